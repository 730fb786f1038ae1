"""How a search result is shown: tables for people, one object for programs."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.placement import chunks_of_stage
from flopwright.planner.explain import (
    Binding,
    largest_class,
    legend,
    noticeable,
    verdict_text,
    why_it_loses,
)
from flopwright.planner.result import RankedPlan, SearchResult
from flopwright.planner.whole_run import WholeRun
from flopwright.report.metrics import MEMORY_CLASSES, TIME_CLASSES, Prediction
from flopwright.spec.scenario import Scenario
from flopwright.units import GIB, plural, show_bytes, show_count, show_seconds

MAX_STAGES_SHOWN = 64
# Below so many columns the widest tables leave something out, or stand without lines.
NARROW = 110
_ONLY_WIDE = frozenset({"tokens/s/GPU", "free (%)", "why it loses"})
# A share of the step that would read 0.0 %.
_LEAST_SHARE = 0.0005


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
        _print_plan_parts(console, result)
        _print_what_would_help(console, result, scenario)
        return
    narrow = console.width < NARROW
    console.print(_ranked_table(result, scenario, narrow=narrow))
    if narrow:
        _print_why(console, result, scenario)
    _print_plan_parts(console, result)
    if result.infeasible:
        console.print(_infeasible_table(result, _better_title(result, scenario)))
    title = f"Memory of plan {chosen.rank} by pipeline stage"
    layers = scenario.model.num_layers
    console.print(memory_table(title, chosen.plan, chosen.prediction, layers, narrow=narrow))
    _print_time(console, chosen)
    _print_run(console, run, chosen)
    told = noticeable(binding)
    console.print(f"[bold]What binds it:[/] {told[0].kind}", highlight=False)
    for b in told[:5]:
        console.print(f"  {b.kind}: {b.text}", highlight=False, soft_wrap=True)
    prediction = chosen.prediction
    console.print(
        f"[bold]Provenance:[/] {prediction.provenance}, "
        f"calibration {prediction.calibration_id or 'none'}",
        highlight=False,
    )
    for text in (*prediction.assumptions, *run.assumptions):
        console.print(f"  assumed: {text}", highlight=False, soft_wrap=True)


def _print_plan_parts(console: Console, result: SearchResult) -> None:
    labels = [p.plan.label() for p in result.ranked]
    text = legend([*labels, *(p.plan.label() for p in result.infeasible)])
    console.print(f"[bold]In a plan:[/] {text}", highlight=False, soft_wrap=True)


def _print_what_would_help(console: Console, result: SearchResult, scenario: Scenario) -> None:
    """Says how much memory the nearest plan would need; that is the least of what is listed."""
    lacking = [p for p in result.infeasible if p.missing_bytes]
    if not lacking:
        return
    nearest = min(lacking, key=lambda p: p.peak_memory_bytes)
    console.print(
        f"[bold]What would help:[/] GPUs with {show_bytes(nearest.peak_memory_bytes)} of memory "
        f"would hold {nearest.plan.label()} (these have "
        f"{show_bytes(scenario.cluster.node.gpu.hbm_bytes)})",
        highlight=False,
        soft_wrap=True,
    )


def _better_title(result: SearchResult, scenario: Scenario) -> str:
    best = result.ranked[0]
    taken = show_seconds(best.prediction.metrics.step_time_s)
    gpus = plural(best.plan.world_size, "GPU")
    word = {
        "time": "Faster",
        "cost": "Cheaper",
        "energy": "With less energy",
        "headroom": "Leaner",
        "gpus": "On fewer GPUs",
    }[scenario.objective]
    where = "a step" if scenario.objective == "time" else f"on {gpus}"
    return f"{word}, but they do not fit (the best plan that fits takes {taken} {where})"


def _columns(table: Table, names: tuple[str, ...]) -> Table:
    for name in names:
        left = name in {"plan", "why it loses", "what is missing", "nearest fix"}
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    return table


def _unit(nbytes: float) -> tuple[str, int]:
    """Returns the unit in which a table of memory is legible, and its bytes."""
    return ("GiB", GIB) if nbytes >= GIB else ("MiB", 2**20)


def _ranked_table(result: SearchResult, scenario: Scenario, *, narrow: bool) -> Table:
    best = result.ranked[0]
    unit, scale = _unit(best.prediction.metrics.peak_memory_bytes)
    names = (
        "#",
        "plan",
        "step (s)",
        "by events (s)",
        "80 % interval (s)",
        "tokens/s/GPU",
        "MFU (%)",
        f"peak ({unit})",
        "free (%)",
        "why it loses",
    )
    shown = [n for n in names if not narrow or n not in _ONLY_WIDE]
    if not result.refined:
        shown.remove("by events (s)")
    table = _columns(Table(title="Best plans, one a layout", title_justify="left"), tuple(shown))
    for plan in result.ranked:
        m, interval = plan.prediction.metrics, plan.prediction.step_time_interval
        cells = (
            str(plan.rank),
            _label(plan),
            f"{m.step_time_s:.4g}",
            "" if plan.refined_step_time_s is None else f"{plan.refined_step_time_s:.4g}",
            f"{interval.low:.3g} - {interval.high:.3g}",
            f"{m.tokens_per_s_per_gpu:,.0f}",
            f"{100 * m.mfu:.1f}",
            f"{m.peak_memory_bytes / scale:.1f}",
            f"{100 * plan.headroom:.1f}",
            "" if plan is best else why_it_loses(best, plan, scenario.objective),
        )
        table.add_row(*(c for n, c in zip(names, cells, strict=True) if n in shown))
    return table


def _label(plan: RankedPlan) -> str:
    return plan.plan.label() if plan.gemm is None else f"{plan.plan.label()} {plan.gemm}"


def _print_why(console: Console, result: SearchResult, scenario: Scenario) -> None:
    """Says why each plan loses, where the table has no room for it."""
    best, *others = result.ranked
    if others:
        console.print("[bold]Why the others lose:[/]", highlight=False)
    for plan in others:
        text = why_it_loses(best, plan, scenario.objective)
        console.print(f"  {plan.rank}  {text}", highlight=False, soft_wrap=True)


def _infeasible_table(result: SearchResult, title: str) -> Table:
    shown = result.infeasible[:3] if result.ranked else result.infeasible
    unit, scale = _unit(max((p.peak_memory_bytes for p in shown), default=0))
    names: tuple[str, ...] = ("plan", "step (s)", f"peak ({unit})", "what is missing")
    # Where nothing fits, no change within the search fits either.
    if any(p.violations[0].nearest_fix for p in shown):
        names += ("nearest fix",)
    table = _columns(Table(title=title, title_justify="left"), names)
    for plan in shown:
        violation = plan.violations[0]
        cells = (
            plan.plan.label(),
            f"{plan.step_time_s:.4g}",
            f"{plan.peak_memory_bytes / scale:,.1f}",
            violation.rule,
            violation.nearest_fix,
        )
        table.add_row(*cells[: len(names)])
    return table


def memory_table(
    title: str, plan: ParallelPlan, prediction: Prediction, num_layers: int, *, narrow: bool
) -> Table:
    """Returns a plan's memory by pipeline stage and class."""
    stages = prediction.metrics.memory_bytes
    classes = [c for c in MEMORY_CLASSES if any(m.get(c) for m in stages)]
    unit, scale = _unit(prediction.metrics.peak_memory_bytes)
    title = f"{title} ({unit})"
    names = ("#" if narrow else "stage", *(c.replace("_", " ") for c in classes), "peak", "layers")
    table = _columns(Table(title=title, title_justify="left"), names)
    if narrow:
        table.box, table.padding, table.pad_edge = None, (0, 1, 0, 0), False
    chunks = plan.chunk_layers(num_layers)
    for stage, memory in enumerate(stages[:MAX_STAGES_SHOWN]):
        held = "+".join(str(len(chunks[c])) for c in chunks_of_stage(plan, stage))
        cells = (f"{memory.get(c, 0) / scale:.2f}" for c in classes)
        table.add_row(str(stage), *cells, f"{sum(memory.values()) / scale:.2f}", held)
    return table


def _print_time(console: Console, chosen: RankedPlan) -> None:
    metrics = chosen.prediction.metrics
    parts = [
        f"{name} {100 * metrics.time_s[name] / metrics.step_time_s:.1f} %"
        for name in TIME_CLASSES
        if metrics.time_s.get(name, 0) >= _LEAST_SHARE * metrics.step_time_s
    ]
    console.print(f"[bold]Time:[/] {', '.join(parts)}", highlight=False, soft_wrap=True)
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
        f"[bold]To the token budget:[/] {show_count(run.tokens)} tokens, "
        f"{plural(run.steps, 'step')}, {days}, {hours} GPU-hours, {money}{energy}",
        highlight=False,
        soft_wrap=True,
    )
    peak = show_bytes(chosen.prediction.metrics.peak_memory_bytes)
    console.print(f"  on {plural(run.gpus, 'GPU')}, peak {peak} each", highlight=False)
