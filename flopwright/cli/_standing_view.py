"""Where given plans stand among all of a search: their memory, their rank, what is better."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flopwright.cli._plan_view import NARROW, memory_table
from flopwright.errors import InputError, Violation
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.families import family_gpu_hours, published_family
from flopwright.planner.plan_text import plan_from_text
from flopwright.planner.search import price
from flopwright.planner.space import legal_candidates
from flopwright.planner.standing import Standing, lack_text, standing
from flopwright.simulator.calibration.model import Calibration
from flopwright.spec.load import load_plan
from flopwright.spec.scenario import Scenario
from flopwright.units import show_percent


def standings(
    scenario: Scenario, calibration: Calibration, also: Sequence[str], *, published: bool
) -> list[Standing]:
    """Returns where the plans that were asked for stand.

    Raises:
        InputError: a plan that cannot be read, or that breaks a rule of shape.
    """
    plans = [(text, _plan(text, scenario)) for text in also]
    if published:
        family = published_family(scenario.name)
        plans.insert(0, (family.name, family.plan_on(scenario)))
    if not plans:
        return []
    priced = price(scenario, legal_candidates(scenario), calibration)
    return [
        standing(scenario, plan, calibration, name=name, priced=priced) for name, plan in plans
    ]


def _plan(text: str, scenario: Scenario) -> ParallelPlan:
    if not text.endswith((".yaml", ".yml")):
        return plan_from_text(text, scenario)
    record = load_plan(Path(text))
    if record.scenario.model != scenario.model:
        raise InputError(
            Violation(
                field="--also",
                value=text,
                rule=f"is a plan of {record.scenario.model.name}, not of {scenario.model.name}",
            )
        )
    return record.parallel


def show_standings(console: Console, scenario: Scenario, stood: Sequence[Standing]) -> None:
    """Prints each plan's verdict, memory by stage, rank, and the reason of every better one."""
    for found in stood:
        _show(console, scenario, found)


def _show(console: Console, scenario: Scenario, found: Standing) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    metrics = found.prediction.metrics
    refined = found.refined_step_time_s
    events = "" if refined is None else f" ({refined:.4g} s by events)"
    say("")
    say(f"[bold]{found.name}:[/] {found.plan.label()}")
    lack = lack_text(found)
    say(
        f"  {metrics.step_time_s:.4g} s a step{events}, MFU {100 * metrics.mfu:.1f} %, "
        + (lack or f"fits with {show_percent(found.headroom)} of the memory free")
    )
    layers, narrow = scenario.model.num_layers, console.width < NARROW
    title = f"Memory of {found.name} by pipeline stage"
    console.print(memory_table(title, found.plan, found.prediction, layers, narrow=narrow))
    unsettled = "" if found.proved else " at least"
    say(
        f"[bold]Rank:[/]{unsettled} {found.rank} of {found.layouts:,} layouts that fit; "
        f"{found.plans_before:,} of {found.plans:,} plans that fit may be better "
        f"(top {show_percent(found.top_share)}); {show_percent(found.behind)} behind the best"
    )
    _say_published(say, scenario, found)
    if found.better:
        say("[bold]Better, and why:[/]")
    for place, plan in enumerate(found.better, 1):
        say(
            f"  {place}  {plan.plan.label()}: {plan.step_time_s:.4g} s, "
            f"{show_percent(plan.gain)} better, {show_percent(plan.headroom)} free: {plan.reason}"
        )
    for text in found.prediction.assumptions:
        say(f"  assumed: {text}")


def _say_published(say: object, scenario: Scenario, found: Standing) -> None:
    """Says what the published run took beside what is predicted, where that is known."""
    assert callable(say)
    try:
        family = published_family(scenario.name)
    except InputError:
        return
    if family.name != found.name:
        return
    say(f"  published: {family.source}")
    if family.assumed:
        say(f"  assumed: {family.assumed}")
    if family.gpu_hours is None:
        return
    hours = family_gpu_hours(family, scenario, found.prediction.metrics.step_time_s)
    say(
        f"[bold]GPU-hours:[/] {hours:,.0f} predicted, {family.gpu_hours:,.0f} published: "
        f"{100 * (hours / family.gpu_hours - 1):+.1f} %"
    )
