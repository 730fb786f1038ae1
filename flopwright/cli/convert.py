"""`flopwright convert`: a checkpoint folder in another release format."""

from __future__ import annotations

import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flopwright.errors import InputError, Violation, did_you_mean

if TYPE_CHECKING:
    from flopwright.models.formats.job import Job

_RULES = ("floor", "even", "ceil", "rceil")


def convert(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="Folder with config.json and safetensors files, or that of a run."),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; must be new or empty.")],
    to: Annotated[str, typer.Option("--to", help="bf16, block_fp8, int4_g32 or mxfp4.")],
    shard_size: Annotated[
        str, typer.Option("--shard-size", help="Most bytes of tensors in one file.")
    ] = "5 GB",
    scale_rule: Annotated[
        str,
        typer.Option(
            "--scale-rule", help="How MXFP4's scales are chosen: floor, even, ceil, rceil."
        ),
    ] = "floor",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and count; write nothing.")
    ] = False,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Of a run: which saved step; the latest.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a checkpoint folder in another release format.

    Reads bf16, block FP8, INT4 (compressed-tensors) and MXFP4 (compressed-tensors, gpt-oss)
    weights and writes any of them, with config.json, index and the files beside. Memory stays
    under 300 MB for models of any size. The folder appears whole at the end, or not at all.
    The checkpoint of a run of `flopwright run` becomes a release likewise.

    Example: flopwright convert Kimi-K2-Instruct k2-mxfp4 --to mxfp4
    """  # fmt: skip
    from flopwright.models.formats.job import check_space, plan_job

    if scale_rule not in _RULES:
        fix = did_you_mean(scale_rule, _RULES)
        rule = "no such rule for scales"
        raise InputError(
            Violation(field="--scale-rule", value=scale_rule, rule=rule, nearest_fix=fix)
        )
    size = _bytes(shard_size)
    if _is_run(checkpoint):
        _release(checkpoint, out, to, step, size, scale_rule, dry_run=dry_run, as_json=as_json)
        return
    if step is not None:
        rule = "only a run has steps"
        raise InputError(Violation(field="--step", value=str(step), rule=rule))
    job = plan_job(checkpoint, out, to, max_shard_bytes=size)
    if not dry_run:
        check_space(job)
        _run(job, scale_rule, quiet=as_json)
    _show(job, to, dry_run=dry_run, as_json=as_json)


def _is_run(path: Path) -> bool:
    """Returns whether a folder is a run or a checkpoint of one, not a released model."""
    if not path.is_dir() or (path / "config.json").is_file():
        return False
    return (path / "manifest.json").is_file() or not any(path.glob("*.safetensors"))


def _release(
    path: Path, out: Path, to: str, step: int | None, size: int, rule: Any, *,
    dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    """Writes a run's checkpoint as a release and says so."""
    _need_torch()
    if dry_run:
        raise InputError(
            Violation(field="--dry-run", value=str(path), rule="is for released folders, not runs")
        )
    from flopwright.executor.release import release_run

    done = release_run(path, out, to, step=step, max_shard_bytes=size, rule=rule)
    if as_json:
        data = {
            "checkpoint": str(done.step_folder),
            "step": done.step,
            "out": str(out),
            "from": "run",
            "to": to,
            "written": True,
            "bytes_written": done.nbytes,
            "files": done.files,
        }
        typer.echo(json.dumps(data))
        return
    typer.echo(
        f"{out}: step {done.step} in {to} takes {done.nbytes:,} bytes in {done.files} file(s)"
    )


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise InputError(
            Violation(rule="converting needs torch", nearest_fix="pip install 'flopwright[train]'")
        )


def _bytes(text: str) -> int:
    from flopwright.units import parse_quantity

    try:
        size = int(parse_quantity(text, "bytes"))
    except ValueError as error:
        raise InputError(Violation(field="--shard-size", value=text, rule=str(error))) from error
    if size < 1:
        raise InputError(Violation(field="--shard-size", value=text, rule="must be positive"))
    return size


def _run(job: Job, rule: Any, *, quiet: bool) -> None:
    """Runs the conversion, with a bar of the bytes written on a terminal's stderr."""
    _need_torch()
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from flopwright.models.formats.convert import run

    console = Console(stderr=True)
    bar = Progress(
        BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console, transient=True
    )
    shown = not quiet and console.is_terminal
    with bar if shown else nullcontext():
        task = bar.add_task("", total=job.nbytes)
        run(job, rule=rule, progress=lambda n: bar.advance(task, n))


def _show(job: Job, to: str, *, dry_run: bool, as_json: bool) -> None:
    quantised, others = job.counts
    source = "bf16" if job.source is None else job.source.name
    if as_json:
        data = {
            "checkpoint": str(job.folder),
            "out": str(job.out),
            "from": source,
            "to": to,
            "written": not dry_run,
            "bytes_read": job.read_bytes,
            "bytes_written": job.nbytes,
            "files": len(job.shards),
            "quantised_weights": quantised,
            "other_weights": others,
            "checked_against_model": job.checked,
        }
        typer.echo(json.dumps(data))
        return
    verb = "would take" if dry_run else "takes"
    typer.echo(
        f"{job.out}: {to} {verb} {job.nbytes:,} bytes in {len(job.shards)} file(s), "
        f"{source} takes {job.read_bytes:,}; {quantised:,} weights quantised, {others:,} others"
    )
    if not job.checked:
        typer.echo("  names and shapes were not checked: config.json's model_type is not known")
