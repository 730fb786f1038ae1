"""How a search result is shown: tables for people, one object for programs."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from flopwright.planner.explain import Binding, largest_class, verdict_text, why_it_loses
from flopwright.planner.result import RankedPlan, SearchResult
from flopwright.planner.whole_run import WholeRun
from flopwright.report.metrics import MEMORY_CLASSES, TIME_CLASSES
from flopwright.spec.scenario import Scenario
from flopwright.units import GIB, show_bytes, show_count, show_seconds

MAX_STAGES_SHOWN = 64


def as_data(
    result: SearchResult,
    scenario: Scenario,
    chosen: RankedPlan | None,
    run: WholeRun | None,
    binding: tuple[Binding, ...],
    written: str | None,
) -> dict[str, Any]:
    """Returns everything that is shown as plain data for `--json` (SI units)."""
    return {
        "scenario": scenario.name,
        "verdict": result.verdict,
        "verdict_text": verdict_text(result, scenario),
        "chosen_rank": None if chosen is None else chosen.rank,
        "binding": [b.to_data() for b in binding],
        "whole_run": None if run is None else run.to_data(),
        "written": written,
        "result": result.to_data(),
    }


def show(
    console: Console,
    result: SearchResult,
    scenario: Scenario,
    chosen: RankedPlan | None,
    run: WholeRun | None,
    binding: tuple[Binding, ...],
) -> None:
    """Prints the verdict, then the plans, then the chosen plan's memory, time and cost."""
    colour = {"fits": "green", "tight": "yellow", "does_not_fit": "red"}[result.verdict]
    console.print(f"[bold {colour}]{verdict_text(result, scenario)}[/]", highlight=False)
    if chosen is None or run is None:
        console.print(_infeasible_table(result, "Nearest plans"))
        return
    console.print(_ranked_table(result, scenario))
    if result.infeasible:
        console.print(
            _infeasible_table(
                result,
                f"{'Faster' if scenario.objective == 'time' else 'Cheaper'}, but they do not fit",
            )
        )
    console.print(_memory_table(chosen, scenario.model.num_layers))
    _print_time(console, chosen)
    _print_run(console, run, chosen)
    console.print(f"[bold]What binds it[/] {binding[0].kind}", highlight=False)
    for b in binding[:5]:
        console.print(f"  {b.kind}: {b.text}", highlight=False, soft_wrap=True)
    prediction = chosen.prediction
    console.print(
        f"[bold]Provenance[/] {prediction.provenance}, "
        f"calibration {prediction.calibration_id or 'none'}",
        highlight=False,
    )
    for text in (*prediction.assumptions, *run.assumptions):
        console.print(f"  assumed: {text}", highlight=False, soft_wrap=True)


def _columns(table: Table, names: tuple[str, ...]) -> Table:
    for name in names:
        left = name in {"plan", "why it loses", "what is missing", "nearest fix"}
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    return table


def _unit(nbytes: float) -> tuple[str, int]:
    """Returns the unit in which a table of memory is legible, and its bytes."""
    return ("GiB", GIB) if nbytes >= GIB else ("MiB", 2**20)


def _ranked_table(result: SearchResult, scenario: Scenario) -> Table:
    best = result.ranked[0]
    unit, scale = _unit(best.prediction.metrics.peak_memory_bytes)
    names = (
        "#",
        "plan",
        "step (s)",
        "80 % interval (s)",
        "tokens/s/GPU",
        "MFU (%)",
        f"peak ({unit})",
        "free (%)",
        "why it loses",
    )
    table = _columns(Table(title="Best plans, one a layout", title_justify="left"), names)
    for plan in result.ranked:
        m, interval = plan.prediction.metrics, plan.prediction.step_time_interval
        table.add_row(
            str(plan.rank),
            plan.plan.label(),
            f"{m.step_time_s:.4g}",
            f"{interval.low:.3g} - {interval.high:.3g}",
            f"{m.tokens_per_s_per_gpu:,.0f}",
            f"{100 * m.mfu:.1f}",
            f"{m.peak_memory_bytes / scale:.1f}",
            f"{100 * plan.headroom:.1f}",
            "" if plan is best else why_it_loses(best, plan, scenario.objective),
        )
    return table


def _infeasible_table(result: SearchResult, title: str) -> Table:
    names = ("plan", "step (s)", "peak (GiB)", "what is missing", "nearest fix")
    table = _columns(Table(title=title, title_justify="left"), names)
    for plan in result.infeasible[:3] if result.ranked else result.infeasible:
        violation = plan.violations[0]
        table.add_row(
            plan.plan.label(),
            f"{plan.step_time_s:.4g}",
            f"{plan.peak_memory_bytes / GIB:.1f}",
            violation.rule,
            violation.nearest_fix,
        )
    return table


def _memory_table(chosen: RankedPlan, num_layers: int) -> Table:
    stages = chosen.prediction.metrics.memory_bytes
    classes = [c for c in MEMORY_CLASSES if any(m.get(c) for m in stages)]
    unit, scale = _unit(chosen.prediction.metrics.peak_memory_bytes)
    title = f"Memory of plan {chosen.rank} by pipeline stage ({unit})"
    table = _columns(
        Table(title=title, title_justify="left"), ("stage", *classes, "peak", "layers")
    )
    chunks = chosen.plan.chunk_layers(num_layers)
    for stage, memory in enumerate(stages[:MAX_STAGES_SHOWN]):
        held = "+".join(str(len(c)) for c in chunks[stage :: chosen.plan.pp])
        cells = (f"{memory.get(c, 0) / scale:.2f}" for c in classes)
        table.add_row(str(stage), *cells, f"{sum(memory.values()) / scale:.2f}", held)
    return table


def _print_time(console: Console, chosen: RankedPlan) -> None:
    metrics = chosen.prediction.metrics
    parts = [
        f"{name} {100 * metrics.time_s[name] / metrics.step_time_s:.1f} %"
        for name in TIME_CLASSES
        if metrics.time_s.get(name, 0) > 0
    ]
    console.print(f"[bold]Time[/] {', '.join(parts)}", highlight=False, soft_wrap=True)
    console.print(f"  largest memory class: {largest_class(metrics)}", highlight=False)


def _print_run(console: Console, run: WholeRun, chosen: RankedPlan) -> None:
    low, high = run.days_interval.low, run.days_interval.high
    money = "price unknown" if run.usd is None else f"{run.usd:,.0f} USD"
    energy = "" if run.kwh is None else f", {run.kwh:,.0f} kWh"
    hours = f"{run.gpu_hours:,.0f}" if run.gpu_hours >= 100 else f"{run.gpu_hours:.3g}"
    days = (
        f"{run.days:.1f} days ({low:.1f} - {high:.1f})"
        if run.days >= 1
        else f"{show_seconds(run.days * 86400)}"
    )
    console.print(
        f"[bold]To the token budget[/] {show_count(run.tokens)} tokens, {run.steps:,} steps, "
        f"{days}, {hours} GPU-hours, {money}{energy}",
        highlight=False,
        soft_wrap=True,
    )
    peak = show_bytes(chosen.prediction.metrics.peak_memory_bytes)
    console.print(f"  on {run.gpus:,} GPUs, peak {peak} each", highlight=False)
