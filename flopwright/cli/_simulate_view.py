"""How a simulated step is shown: a table for people, one object for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from flopwright.units import GIB, plural, show_bytes, show_percent, show_seconds

if TYPE_CHECKING:
    from flopwright.plan.parallel import ParallelPlan
    from flopwright.simulator.engine.memory_timeline import RankMemory
    from flopwright.simulator.engine.simulate import SimulatedStep
    from flopwright.spec.scenario import Scenario

MAX_STAGES_SHOWN = 64


def as_data(
    scenario: Scenario, plan: ParallelPlan, calibration_id: str, step: SimulatedStep
) -> dict[str, Any]:
    """Returns everything that is shown as plain data for `--json` (SI units)."""
    from flopwright.simulator.engine.simulate import spread

    return {
        "scenario": scenario.name,
        "plan": plan.label(),
        "calibration_id": calibration_id,
        "engine": step.engine,
        "step_time_s": step.step_time_s,
        "samples_s": list(step.samples_s),
        "samples": spread(step.samples_s),
        "time_s": step.time_s,
        "critical_rank": step.critical_rank,
        "ranks": step.ranks,
        "bubble": step.bubble,
        "num_events": step.num_events,
        "gpu_memory_bytes": scenario.cluster.node.gpu.hbm_bytes,
        "fits": not _too_full(scenario, step),
        "memory": [
            {
                "stage": m.stage,
                "peak_bytes": m.peak_bytes,
                "peak_s": m.peak_s,
                "peak_action": m.peak_action,
                "peak_operator": m.peak_operator,
            }
            for m in step.memory
        ],
        "assumptions": list(step.assumptions),
    }


def show(console: Console, scenario: Scenario, plan: ParallelPlan, step: SimulatedStep) -> None:
    """Prints the step, its time by class and each stage's memory."""
    from flopwright.simulator.engine.simulate import spread

    how = "longest path of its list" if step.engine == "replay" else "event by event"
    console.print(f"[bold]{scenario.name}[/]  {plan.label()}  ({how})", highlight=False)
    line = f"step {show_seconds(step.step_time_s)}   bubble {show_percent(step.bubble)}"
    if len(step.samples_s) > 1:
        quantiles = spread(step.samples_s)
        line = (
            f"step {show_seconds(quantiles['median'])} (p10 {show_seconds(quantiles['p10'])}, "
            f"p90 {show_seconds(quantiles['p90'])} of {plural(len(step.samples_s), 'step')}; "
            f"below: the first, {show_seconds(step.step_time_s)})   "
            f"bubble {show_percent(step.bubble)}"
        )
    console.print(line, highlight=False)
    alike = step.ranks == plan.pp and plan.world_size > plan.pp
    what = "stage" if alike else "rank"
    table = Table(title=f"Exposed time of {what} {step.critical_rank}, the busiest")
    table.add_column("class")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in step.time_s.items():
        if seconds > 0:
            share = show_percent(seconds / step.step_time_s)
            table.add_row(name, show_seconds(seconds), share)
    console.print(table)
    console.print(_memory_table(step.memory))
    full = _too_full(scenario, step)
    if full:
        most = max(full, key=lambda m: m.peak_bytes)
        console.print(
            f"[bold]does not fit[/]: {plural(len(full), 'stage')} of {plan.pp}; "
            f"stage {most.stage} holds {show_bytes(most.peak_bytes)}, "
            f"a GPU {show_bytes(scenario.cluster.node.gpu.hbm_bytes)}",
            highlight=False,
        )
    for note in step.assumptions:
        console.print(f"assumed: {note}", highlight=False)


def _too_full(scenario: Scenario, step: SimulatedStep) -> list[RankMemory]:
    """Returns the stages that hold more than a GPU has."""
    most = scenario.cluster.node.gpu.hbm_bytes
    return [m for m in step.memory if m.peak_bytes > most]


def _memory_table(memory: tuple[RankMemory, ...]) -> Table:
    table = Table(title="Memory through the step")
    for name in ("stage", "peak (GiB)", "at", "while", "fullest at"):
        table.add_column(name, justify="left" if name in {"while", "fullest at"} else "right")
    for m in memory[:MAX_STAGES_SHOWN]:
        table.add_row(
            str(m.stage),
            f"{m.peak_bytes / GIB:.1f}",
            show_seconds(m.peak_s),
            m.peak_action,
            m.peak_operator,
        )
    if len(memory) > MAX_STAGES_SHOWN:
        most = max(memory, key=lambda m: m.peak_bytes)
        table.caption = f"fullest: stage {most.stage}, {show_bytes(most.peak_bytes)}"
    return table
