"""`flopwright import`: a running job's configuration becomes a scenario and a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from flopwright.planner.import_.imported import ImportedRun
    from flopwright.spec.cluster import ClusterSpec
    from flopwright.spec.model import ModelSpec

Kind = Literal["deepspeed", "megatron", "torchtitan"]


def import_run(
    kind: Annotated[Kind, typer.Argument(help="deepspeed, megatron or torchtitan")],
    config: Annotated[
        Path,
        typer.Argument(help="DeepSpeed JSON, file with the Megatron-LM command line, or TOML"),
    ],
    model: Annotated[
        str,
        typer.Option("--model", help="catalog name, model.yaml, or a Hugging Face config.json"),
    ],
    cluster: Annotated[str, typer.Option("--cluster", help="catalog name or cluster.yaml")],
    out: Annotated[Path, typer.Option("--out", help="plan file to write")] = Path("plan.yaml"),
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="ranks of the job; default: the cluster's")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", min=1, help="tokens a sequence, for deepspeed")
    ] = None,
    pp: Annotated[int, typer.Option("--pp", min=1, help="pipeline stages, for deepspeed")] = 1,
    force: Annotated[bool, typer.Option("--force", help="write over the file")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Read a running job's configuration into a plan file: predict it, or ask what if.

    Says what it assumed and which settings it did not read.

    Example: flopwright import megatron train.sh --model llama31_70b --cluster 64_h100 --gpus 512
    """
    from flopwright.cli.import_model import write_new
    from flopwright.simulator.training.predict import predict
    from flopwright.spec.load import dump_yaml, load_cluster, make_plan_file

    machine = load_cluster(cluster)
    text = _read(config)
    run = _import(
        kind, text, _model(model), machine, gpus or machine.num_gpus, seq_len=seq_len, pp=pp
    )
    prediction, _ = predict(run.scenario, run.parallel, name=run.scenario.name)
    plan = make_plan_file(run.scenario, run.parallel, config.stem)
    write_new(out, dump_yaml(plan, header=f"imported from {config.name}"), force=force)
    if as_json:
        data = {
            "file": str(out),
            "plan": run.parallel.to_data(),
            "prediction": prediction.to_data(),
            "assumed": list(run.assumed),
            "not_read": list(run.not_read),
        }
        typer.echo(json.dumps(data))
        return
    step, peak = prediction.metrics.step_time_s, prediction.metrics.peak_memory_bytes
    typer.echo(f"{out}: {run.parallel.label()} on {run.parallel.world_size} ranks")
    typer.echo(f"  predicted: {step:.3g} s a step, {peak / 2**30:.1f} GiB on the fullest rank")
    for note in run.assumed:
        typer.echo(f"  assumed: {note}")
    if run.not_read:
        typer.echo(f"  not read: {', '.join(run.not_read)}")


def _read(config: Path) -> str:
    from flopwright.errors import InputError, Violation

    try:
        return config.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or "is no text"
        raise InputError(Violation(file=str(config), rule=f"cannot be read: {what}")) from error


def _model(name: str) -> ModelSpec:
    """Returns the model of a catalog name, a model file, or a Hugging Face config."""
    from flopwright.spec.load import load_model

    path = Path(name)
    if path.suffix == ".json" or (path.is_dir() and (path / "config.json").exists()):
        from flopwright.models.hf.config import import_config

        return import_config(path, None).spec
    return load_model(name)


def _import(
    kind: Kind,
    text: str,
    model: ModelSpec,
    cluster: ClusterSpec,
    gpus: int,
    *,
    seq_len: int | None,
    pp: int,
) -> ImportedRun:
    from flopwright.errors import InputError, Violation
    from flopwright.planner.import_.deepspeed import import_deepspeed
    from flopwright.planner.import_.megatron import import_megatron
    from flopwright.planner.import_.torchtitan import import_torchtitan

    if kind == "megatron":
        return import_megatron(text, model, cluster, gpus=gpus)
    if kind == "torchtitan":
        return import_torchtitan(text, model, cluster, gpus=gpus)
    if seq_len is None:
        raise InputError(
            Violation(
                field="seq_len",
                rule="a DeepSpeed JSON does not hold the context length",
                nearest_fix="give --seq-len",
            )
        )
    return import_deepspeed(text, model, cluster, gpus=gpus, seq_len=seq_len, pp=pp)
