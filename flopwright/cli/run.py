"""`flopwright run`: one or more plans, for real, on this machine."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flopwright.cli._restarts import Fallback, MaxRestarts, MaxRollbacks, supervision
from flopwright.cli._run_options import (
    AsJson,
    NoStore,
    Nproc,
    Prefetch,
    ProbeSeconds,
    StoreUrl,
    Stream,
    Text,
    Tokenizer,
)

if TYPE_CHECKING:
    from flopwright.executor.launch.local import RunResult
    from flopwright.executor.launch.progress import Progress
    from flopwright.report.metrics import Measurement
    from flopwright.report.trace import Trace


# What a shell reports of a process that SIGTERM ended.
EXIT_TERMINATED: Final = 143


class LogTo(Enum):
    """Where figures go besides the JSONL files."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


def run(
    plans: Annotated[
        list[Path],
        typer.Argument(metavar="PLAN...", help="Plan files; twice the same shows the noise."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for everything the run writes; new or empty."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out from its checkpoint.")
    ] = False,
    checkpoint_every: Annotated[
        int | None,
        typer.Option("--checkpoint-every", min=1, help="Steps between; default: at the end."),
    ] = None,
    keep_checkpoints: Annotated[
        int, typer.Option("--keep-checkpoints", min=1, help="Steps whose checkpoints stay.")
    ] = 2,
    max_restarts: MaxRestarts = 0,
    fallback: Fallback = None,
    max_rollbacks: MaxRollbacks = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Only algorithms that repeat every bit.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Optimizer steps; default: the budget's.")
    ] = None,
    text: Text = None,
    stream: Stream = False,
    prefetch: Prefetch = None,
    tokenizer: Tokenizer = "bpe",
    nproc: Nproc = None,
    export_hf: Annotated[
        bool,
        typer.Option("--export-hf", help="At the end, also weights as Hugging Face has them."),
    ] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="Refuse plans that are for another model.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", help="Name of a plan's results; once a plan, in order."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Of weights and data; default: the plan's.")
    ] = None,
    allow_mismatch: Annotated[
        bool, typer.Option("--allow-mismatch", help="Run a plan made for another kind of device.")
    ] = False,
    collective_timeout: Annotated[
        float,
        typer.Option("--collective-timeout", min=1, help="Seconds a rank waits for others."),
    ] = 600.0,
    log_to: Annotated[
        list[LogTo] | None,
        typer.Option("--log-to", help="Also write figures for these; once each."),
    ] = None,
    kineto_trace: Annotated[
        bool, typer.Option("--kineto-trace", help="Write torch's profile of one step a plan.")
    ] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure the machine in the same launch.")
    ] = False,
    probe_seconds: ProbeSeconds = 45.0,
    store: StoreUrl = None,
    no_store: NoStore = False,
    dry: Annotated[
        bool, typer.Option("--dry", help="Run ranks without values or GPUs; compare with predict.")
    ] = False,
    rank: Annotated[
        str, typer.Option("--rank", help="With --dry: a rank's number, or all-roles.")
    ] = "0",
    as_json: AsJson = False,
) -> None:
    """Run one or more plans for real: train, measure, save, compare losses.

    The plan of a whole run (`flopwright plan` writes it for a scenario with several phases)
    goes through its phases, each under its own plan and measured apart.

    Several plans take turns in one launch, so that they meet the same machine. Ctrl-C ends
    the run after the present round with everything written; a second one ends it at once.
    SIGTERM ends it after the present step with a checkpoint (exit code 143).
    A run that ended early, however it ended, goes on with --resume, under its own plan or
    another one of the same workload.

    With --dry no rank but this process exists: it makes the step of the rank asked for, at its
    true size, on tensors without values, and compares every action, message and matrix
    product and the memory with the prediction. Exit code 1 says that something differs.

    Example: flopwright run plan.yaml --text my_texts/ --steps 200
    """
    if dry:
        _dry(plans, rank, as_json=as_json)
        return
    from flopwright.executor.launch.checks import LaunchOptions
    from flopwright.executor.launch.local import RunFailedError, RunStoppedError
    from flopwright.executor.launch.phases import launch_phases

    phases = _is_of_phases(plans)
    options = LaunchOptions(
        steps=steps,
        nproc=nproc,
        text=text,
        stream=stream,
        prefetch=prefetch,
        tokenizer=tokenizer,
        model=model,
        names=tuple(name or ()),
        seed=seed,
        allow_mismatch=allow_mismatch,
        collective_timeout_s=collective_timeout,
        log_to=tuple(sink.value for sink in dict.fromkeys(log_to or ())),
        kineto_trace=kineto_trace,
        probe=probe,
        probe_budget_s=probe_seconds,
        resume=resume,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        max_rollbacks=max_rollbacks,
        deterministic=deterministic,
        export_hf=export_hf,
    )
    out_dir = out or Path("runs") / f"{plans[0].stem}-{datetime.now():%Y%m%d-%H%M%S}"
    if store is not None and not no_store:
        _check_store(store)
    start = supervision(plans, max_restarts, fallback, phases=phases)
    try:
        with progress_display(quiet=as_json) as show:
            if phases:
                whole = launch_phases(plans[0], out_dir, options, show, start)
                results = [p.result for p in whole]
            else:
                results = [start(plans, out_dir, options, show)]
    except RunFailedError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except RunStoppedError as stopped:
        typer.echo(str(stopped), err=True)
        raise typer.Exit(EXIT_TERMINATED) from None
    except KeyboardInterrupt:
        typer.echo(f"ended; what was written so far is in {out_dir}", err=True)
        raise typer.Exit(130) from None
    told = [(r, "" if no_store else _store(r, store)) for r in results]
    if as_json:
        data = [_as_data(*each) for each in told]
        typer.echo(json.dumps({"phases": data} if phases else data[0]))
    else:
        for each in told:
            _report(*each)
    diverged = diverged_plans(m for r in results for m in r.measurements)
    if diverged:
        typer.echo(f"the loss is not finite: {', '.join(diverged)}", err=True)
        raise typer.Exit(1)


def _is_of_phases(plans: list[Path]) -> bool:
    """Whether the plan is of a whole run; several plans are of one step each."""
    from flopwright.executor.launch.phases import is_run_plan

    return len(plans) == 1 and is_run_plan(plans[0])


def _dry(plans: list[Path], rank: str, *, as_json: bool) -> None:
    """Runs plans dry, one after the other; exit code 1 where one differs from its prediction."""
    from flopwright.cli._dry import dry_run, report

    found = [dry_run(path, rank, quiet=as_json) for path in plans]
    if as_json:
        data = [{"plan": p.name, "roles": [r.to_data() for r in results]} for p, results in found]
        typer.echo(json.dumps(data))
    else:
        for plan, results in found:
            report(plan, results, typer.echo)
    if any(r.differences for _, results in found for r in results):
        raise typer.Exit(1)


def diverged_plans(measurements: Iterable[Measurement]) -> list[str]:
    """Returns the plans whose loss stopped being a number, each with its first such step."""
    found = []
    for m in measurements:
        bad = next((i for i, loss in enumerate(m.losses, 1) if not math.isfinite(loss)), None)
        if bad is not None:
            found.append(f"{m.plan_name} from step {bad} on")
    return found


def _check_store(url: str) -> None:
    """Refuses a store that cannot be used before anything runs."""
    from flopwright.store import open_store

    open_store(url)


def _store(result: RunResult, url: str | None) -> str:
    """Adds the measurements to the store and returns its address, without a password."""
    from sqlalchemy import make_url

    from flopwright.store import default_url, open_store

    kept = open_store(url)
    for measurement in result.measurements:
        kept.add(*_with_traces(result.out_dir, measurement))
    address = url or default_url()
    return make_url(address).render_as_string() if "://" in address else address


def _with_traces(out_dir: Path, measurement: Measurement) -> tuple[Measurement, Trace]:
    """Returns a measurement with the kernels that a profile of it shows, and its actions."""
    from flopwright.executor.launch.request import kineto_file, trace_file
    from flopwright.report.trace import read_chrome_trace
    from flopwright.simulator.comparison.foreign import with_kernels
    from flopwright.store.foreign.kineto import read_kineto

    name = measurement.plan_name
    profiles = [out_dir / kineto_file(name, r.rank) for r in measurement.ranks]
    seen = [read_kineto(path) for path in profiles if path.is_file()]
    trace = out_dir / trace_file(name)
    actions = read_chrome_trace(trace) if trace.is_file() else ()
    return with_kernels(measurement, seen) if seen else measurement, actions


def _as_data(result: RunResult, stored: str) -> dict[str, Any]:
    return {
        "out": str(result.out_dir),
        "store": stored,
        "stopped_early": result.stopped_early,
        "measurements": [m.to_data() for m in result.measurements],
        "checkpoints": {n: str(p) for n, p in result.checkpoints.items()},
    }


def _report(result: RunResult, stored: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from flopwright.units import show_bytes, show_seconds

    table = Table(title="measured")
    for column in ("plan", "step time", "p10 .. p90", "tokens/s", "peak memory", "held-out loss"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for m in result.measurements:
        held_out = "" if m.held_out_loss is None else f"{m.held_out_loss:.4f}"
        table.add_row(
            m.plan_name,
            show_seconds(m.metrics.step_time_s),
            f"{show_seconds(m.step_time_p10_s)} .. {show_seconds(m.step_time_p90_s)}",
            f"{m.metrics.tokens_per_s:,.0f}",
            show_bytes(m.metrics.peak_memory_bytes),
            held_out,
        )
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    floor = result.measurements[0].noise_floor
    if floor is not None:
        console.print(f"noise floor: {floor:.1%} (one plan run under two names)")
    for m in result.measurements:
        for mismatch in m.mismatch:
            console.print(f"allowed mismatch: {mismatch}")
    if result.stopped_early:
        console.print("stopped early: fewer steps than asked for")
    console.print(f"files: {result.out_dir}" + (f"; store: {stored}" if stored else ""))


@contextmanager
def progress_display(*, quiet: bool = False) -> Iterator[Progress]:
    """Gives a callback for `launch` that shows progress on stderr: bars on a terminal, else lines.

    Args:
        quiet: show nothing.
    """
    if quiet:
        yield lambda event: None
    elif sys.stderr.isatty():
        with _bars() as show:
            yield show
    else:
        from flopwright.executor.launch.progress import progress_lines

        yield progress_lines(lambda line: typer.echo(line, err=True))


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[detail]}"),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:
        phase = bars.add_task("starting", total=1, detail="")

        def show(event: dict[str, Any]) -> None:
            if event.get("note"):
                bars.console.print(event["phase"])
                return
            if "plan" not in event:
                bars.update(phase, description=event["phase"], completed=event["share"])
                return
            bars.update(phase, visible=False)
            plan = event["plan"]
            if plan not in tasks:
                tasks[plan] = bars.add_task(plan, total=event["steps"], detail="")
            detail = (
                f"loss {event['loss']:.4f}  {event['tokens_per_s']:,.0f} tokens/s  "
                f"{event['eta_s']:.0f} s left"
            )
            bars.update(tasks[plan], completed=event["step"], detail=detail)

        yield show
