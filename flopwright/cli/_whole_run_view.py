"""`flopwright plan --whole-run`: every phase planned, shown, and written as one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from flopwright.planner.phases_result import PhasedRun, PhaseRun
    from flopwright.simulator.calibration.model import Calibration
    from flopwright.spec.scenario import Scenario

EXIT_DOES_NOT_FIT = 1
_NARROW = 110


def plan_whole_run(
    scenario: Scenario,
    calibration: Calibration,
    *,
    restart: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Plans every phase of the scenario, prints what the run takes and writes its plan.

    Raises:
        typer.Exit: with 1 where a phase has no plan that fits; then nothing is written.
    """
    from flopwright.cli._console import console_of

    found = _planned(scenario, calibration, _seconds(restart), quiet=as_json)
    if out is not None and found.complete:
        _write(scenario, found, out)
    written = str(out) if out is not None and found.complete else None
    if as_json:
        typer.echo(json.dumps({"written": written, "complete": found.complete, **found.to_data()}))
    else:
        show(console_of(140), found)
        if found.complete:
            name = found.phases[-1].name
            typer.echo(
                f"Go on: flopwright plan ... --phase {name} --out plan.yaml plans one phase"
            )
    if not found.complete:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _planned(
    scenario: Scenario, calibration: Calibration, restart_s: float | None, *, quiet: bool
) -> PhasedRun:
    from rich.progress import Progress as Bar

    from flopwright.planner.phases import Means, plan_phases

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("pricing plans", total=None)

        def say(text: str) -> None:
            bar.update(task, description=text, completed=0, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        means = Means(calibration=calibration, restart_s=restart_s, say=say, progress=advance)
        return plan_phases(scenario, means)


def _seconds(text: str | None) -> float | None:
    from flopwright.errors import InputError, Violation
    from flopwright.units import parse_quantity

    if text is None:
        return None
    try:
        return float(parse_quantity(text, "seconds"))
    except ValueError as error:
        fix = "write it like 20min, 1h or 90 s"
        found = Violation(field="--restart", value=text, rule=str(error), nearest_fix=fix)
        raise InputError(found) from error


def _write(scenario: Scenario, found: PhasedRun, out: Path) -> None:
    import flopwright
    from flopwright.plan.phases import PhasePlan, RunPlan
    from flopwright.planner.predicted import predicted_step
    from flopwright.simulator.calibration.files import write_atomically
    from flopwright.spec.load import dump_yaml

    phases = [
        PhasePlan(
            name=phase.name,
            parallel=phase.plan.plan,
            predicted=predicted_step(phase.plan.prediction),
        )
        for phase in found.phases
        if phase.plan is not None
    ]
    record = RunPlan(
        tool_version=flopwright.__version__,
        scenario_hash=scenario.content_hash(),
        scenario=scenario,
        phases=tuple(phases),
    )
    write_atomically(out, dump_yaml(record, f"{scenario.name}: the split of each phase"))


def show(console: Console, found: PhasedRun) -> None:
    """Prints the sums, then each phase with its plan, and what is assumed."""
    colour = "green" if found.complete else "red"
    console.print(f"[bold {colour}]{_verdict(found)}[/]", highlight=False, soft_wrap=True)
    console.print(_table(found, narrow=console.width < _NARROW))
    for phase in found.phases:
        for line in _phase_lines(phase):
            console.print(line, highlight=False, soft_wrap=True)
    for text in found.assumptions:
        console.print(f"  assumed: {text}", highlight=False, soft_wrap=True)


def _verdict(found: PhasedRun) -> str:
    from flopwright.units import plural, show_count

    if found.days is None or found.days_interval is None or found.gpu_hours is None:
        lacking = [phase.name for phase in found.phases if phase.plan is None]
        return (
            f"no whole run: {plural(len(lacking), 'phase')} without a plan: {', '.join(lacking)}"
        )
    low, high = found.days_interval.low, found.days_interval.high
    money = "price unknown" if found.usd is None else f"{found.usd:,.0f} USD"
    energy = "" if found.kwh is None else f", {found.kwh / 1000:,.0f} MWh"
    assert found.tokens is not None
    assert found.steps is not None
    return (
        f"{plural(len(found.phases), 'phase')}: {show_count(found.tokens)} tokens in "
        f"{plural(found.steps, 'step')}, {found.days:.3g} days ({low:.3g} - {high:.3g}), "
        f"{found.gpu_hours:,.0f} GPU-hours, {money}{energy}"
    )


_COLUMNS = (
    "phase", "tokens", "context", "batch", "steps", "step (s)", "days", "interval",
    "GPU-hours", "USD", "MWh",
)  # fmt: skip
_ONLY_WIDE = frozenset({"interval", "USD", "MWh"})


def _table(found: PhasedRun, *, narrow: bool) -> Table:
    from flopwright.units import show_count

    shown = [n for n in _COLUMNS if not narrow or n not in _ONLY_WIDE]
    table = Table(title="Phases", title_justify="left")
    for name in shown:
        table.add_column(name, justify="left" if name == "phase" else "right", overflow="fold")
    for phase in found.phases:
        batch = phase.batches[-1].sequences if phase.batches else None
        cells = [phase.name, show_count(phase.total_tokens), f"{phase.seq_len:,}"]
        cells.append("" if batch is None else f"{batch:,}")
        cells += _run_cells(phase)
        table.add_row(*(c for n, c in zip(_COLUMNS, cells, strict=True) if n in shown))
    return table


def _run_cells(phase: PhaseRun) -> list[str]:
    run, plan = phase.run, phase.plan
    if run is None or plan is None:
        return ["", "none fits", *[""] * 5]
    interval = run.days_interval
    return [
        f"{run.steps:,}",
        f"{plan.prediction.metrics.step_time_s:.4g}",
        f"{run.days:.3g}",
        f"{interval.low:.3g} - {interval.high:.3g}",
        f"{run.gpu_hours:,.0f}",
        "?" if run.usd is None else f"{run.usd:,.0f}",
        "?" if run.kwh is None else f"{run.kwh / 1000:,.0f}",
    ]


def _phase_lines(phase: PhaseRun) -> list[str]:
    from flopwright.units import show_bytes, show_percent, show_seconds

    lines = [f"[bold]{phase.name}[/]" + (f" on {phase.mixture}" if phase.mixture else "")]
    if phase.plan is None:
        lines.append(f"  {phase.missing}")
    else:
        metrics = phase.plan.prediction.metrics
        wait = f", {show_seconds(phase.restart_s)} to change to it" if phase.changes else ""
        lines.append(
            f"  plan: {phase.plan.plan.label()}{wait}; peak "
            f"{show_bytes(metrics.peak_memory_bytes)} a GPU ({show_percent(phase.plan.headroom)} "
            f"free), MFU {100 * metrics.mfu:.1f} %"
        )
    rates = "; ".join(
        f"{s.kind} {s.first:.3g} to {s.last:.3g} in {s.steps:,} steps"
        if s.first != s.last
        else f"{s.kind} {s.first:.3g} for {s.steps:,} steps"
        for s in phase.learning_rate
    )
    lines.append(f"  learning rate: {rates}")
    if len(phase.batches) > 1:
        levels = (f"{b.sequences:,} x {b.steps:,} ({b.step_time_s:.3g} s)" for b in phase.batches)
        lines.append(f"  batches, sequences x steps: {', '.join(levels)}")
    if phase.rope_scaling != "none":
        lines.append(f"  positions: {phase.rope_scaling}")
    return lines
