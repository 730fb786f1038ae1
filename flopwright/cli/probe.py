"""`flopwright probe`: measure this machine; a cluster file and a first calibration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from flopwright.executor.measure.probe_request import ProbeRequest
    from flopwright.plan.file import PlanFile
    from flopwright.report.probe import ProbeReport
    from flopwright.spec.scenario import Scenario

_DEFAULT_SCENARIO = "kimi_k2_mini_2cpu_fp32"
_FILES = {"probe": "probe.json", "cluster": "cluster.yaml", "calibration": "calibration.yaml"}


def probe(
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Ranks; default: one a GPU, or a core.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for cluster.yaml, calibration.yaml, probe.json.")
    ] = Path("machine"),
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.05, help="Minutes to measure for.")
    ] = 1.0,
    scenario: Annotated[
        str,
        typer.Option("--scenario", help="Measure the shapes that this scenario's model needs."),
    ] = _DEFAULT_SCENARIO,
    prepare: Annotated[
        bool,
        typer.Option("--prepare", help="Only write request.json, for ranks that you start."),
    ] = False,
    read: Annotated[
        bool, typer.Option("--read", help="Measure nothing: read the probe.json in --out.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine: operators, memory, collectives, checkpoints, reference steps.

    All ranks measure at the same time, so that what they share is shared as in training. Slow
    processors and links are named. Ended with Ctrl-C, the same command goes on where it was.
    Across nodes: --prepare, start the ranks with torchrun or srun (request.json says how), --read.

    Example: flopwright probe --nproc 2 --minutes 2 --out machine
    """
    from flopwright.cli._probe_view import progress_display, show
    from flopwright.executor.measure.probe_request import run_probe_ranks, write_request
    from flopwright.planner.export.folder import check_folder
    from flopwright.report.probe import ProbeReport
    from flopwright.spec.load import load_scenario

    wanted = load_scenario(scenario)
    folder = out.resolve()
    check_folder(folder, _FILES.values(), force=True)
    if read:
        report = _read(folder / _FILES["probe"], ProbeReport)
    else:
        ranks, request = _request(wanted, nproc, 60.0 * minutes)
        folder.mkdir(parents=True, exist_ok=True)
        if prepare:
            typer.echo(f"written: {write_request(request, folder)}; {_how_to_start(out)}")
            return
        try:
            with progress_display(quiet=as_json) as tell:
                report = run_probe_ranks(request, ranks, folder, tell)
        except KeyboardInterrupt:
            typer.echo(f"ended; measured so far is in {out}: the same command goes on", err=True)
            raise typer.Exit(130) from None
    data = _write(report, folder)
    if as_json:
        files = {name: str(out / f) for name, f in _FILES.items()}
        typer.echo(json.dumps(data | {"files": files}))
        return
    show(report)
    names = ", ".join(str(out / f) for f in _FILES.values())
    typer.echo(f"calibration {data['calibration']}; files: {names}")


def _request(wanted: Scenario, nproc: int | None, seconds: float) -> tuple[int, ProbeRequest]:
    """Returns how many ranks measure, and what."""
    import importlib.util

    from flopwright.errors import InputError, Violation
    from flopwright.executor.launch.machine import find_machine
    from flopwright.executor.measure.probe_request import ProbeRequest

    if importlib.util.find_spec("torch") is None:
        raise InputError(
            Violation(
                rule="probing runs the model's own ops, which need torch",
                nearest_fix="pip install 'flopwright[train]'",
            )
        )
    machine = find_machine()
    ranks = nproc or machine.gpus or machine.cores
    if machine.gpus and ranks > machine.gpus:
        raise InputError(
            Violation(
                field="nproc",
                value=str(ranks),
                rule="there is one rank a GPU",
                limit=str(machine.gpus),
                nearest_fix=f"use --nproc {machine.gpus}",
            )
        )
    device: Literal["cuda", "cpu"] = "cuda" if machine.gpus else "cpu"
    return ranks, ProbeRequest(device=device, plans=_shapes(wanted, ranks), budget_s=seconds)


def _how_to_start(out: Path) -> str:
    return (
        "start the ranks, for example on two nodes with eight each:\n"
        "  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d "
        "--rdzv-endpoint HOST:29500 -m flopwright.executor.measure.probe_worker "
        f"{out / 'request.json'}\nthen: flopwright probe --out {out} --read"
    )


def _read(path: Path, kind: type[ProbeReport]) -> ProbeReport:
    from dataclasses import replace

    from flopwright.errors import InputError
    from flopwright.report.probe_checks import probe_violations
    from flopwright.spec.validate import validate
    from flopwright.spec.yaml_lines import read_yaml

    document = read_yaml(path)
    report = validate(kind, document)
    broken = [
        replace(v, file=document.file, line=document.line_of(where))
        for where, v in probe_violations(report)
    ]
    if broken:
        raise InputError(broken)
    return report


def _write(report: ProbeReport, folder: Path) -> dict[str, Any]:
    """Writes the three files and the calibration by its id; returns what --json prints."""
    from flopwright.planner.export.folder import write_folder
    from flopwright.simulator.calibration.cluster_file import cluster_from_probe, link_name
    from flopwright.simulator.calibration.files import save_calibration
    from flopwright.simulator.calibration.fit_probe import fit_probe
    from flopwright.simulator.calibration.machines import save_machine
    from flopwright.spec.load import dump_yaml

    cluster, calibration = cluster_from_probe(report), fit_probe(report, link_name(report))
    contents = {
        "probe": report.model_dump_json(exclude_none=True, indent=1),
        "cluster": dump_yaml(cluster, header="Written by flopwright probe."),
        "calibration": dump_yaml(calibration, header=calibration.source),
    }
    written = {_FILES[name]: text.encode() for name, text in contents.items()}
    write_folder(folder, written, force=True)
    save_calibration(calibration)  # so that other verbs find it
    save_machine(cluster)  # and the dashboard the machine
    (folder / "request.json").unlink(missing_ok=True)
    return {
        "probe": report.to_data(),
        "cluster": cluster.to_data(),
        "calibration": calibration.id,
        "slow_ranks": [r.to_data() for r in report.slow_ranks()],
        "slow_links": [x.to_data() for x in report.slow_links()],
    }


def _shapes(scenario: Scenario, ranks: int) -> tuple[PlanFile, ...]:
    """Returns plans whose shapes are worth measuring: experts whole, and split over the ranks."""
    from flopwright.plan.parallel import ParallelPlan
    from flopwright.spec.load import make_plan_file

    sizes = scenario.search.micro_batch_size or (1,)
    moe = scenario.model.moe
    splits = {1}
    if moe is not None and ranks > 1 and moe.num_experts % ranks == 0:
        splits.add(ranks)
    return tuple(
        make_plan_file(
            scenario, ParallelPlan(dp_shard=ranks, ep=ep, micro_batch_size=size), f"ep{ep}"
        )
        for size in sizes
        for ep in sorted(splits)
    )
