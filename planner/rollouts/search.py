"""The search for an RL loop: split, instances, concurrency, lambda, pool and the update's plan.

A small grid is searched whole: every choice is made complete (candidate.py) and bounded
(bounds.py); those that fit are simulated best first, until bounds rule out the rest
(best_first.py). A large one is searched from coarse to fine (descent.py). Then values between
the best one's neighbours are tried on the axes that are continuous.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from flopwright.errors import InputError, Violation
from flopwright.planner.rollouts.best_first import Progress, between
from flopwright.planner.rollouts.bounds import work_of
from flopwright.planner.rollouts.choices import Choice, choices
from flopwright.planner.rollouts.descent import Covered, coarse_to_fine
from flopwright.planner.rollouts.known import Known
from flopwright.planner.rollouts.result import LoopResult
from flopwright.planner.rollouts.simulated import Simulations
from flopwright.planner.rollouts.told import result_of
from flopwright.spec.loop import LoopScenario

_ZOOMS: Final = 3  # rounds of values between neighbours
WHOLE_UP_TO: Final = 150  # choices of a grid that is searched whole


def search_loop(
    loop: LoopScenario,
    *,
    rounds: int | None = None,
    seed: int | None = None,
    time_limit_s: float | None = None,
    top_k: int = 5,
    zoom: bool = True,
    whole_up_to: int = WHOLE_UP_TO,
    progress: Progress | None = None,
) -> LoopResult:
    """Returns the best loops of a scenario, the front, and what does not fit.

    Args:
        rounds: kept of each simulation, after its warm-up; None takes the scenario's.
        time_limit_s: no simulation starts after it, but the first one does.
        zoom: try values between neighbours of the best, on lambda and slots.
        whole_up_to: grids of more choices are searched from coarse to fine.
        progress: called with (settled, all) of what is looked at.

    Raises:
        InputError: not one choice could even be made complete.
    """
    known = Known(
        loop=loop,
        rounds=rounds or loop.rollout.rounds,
        sims=Simulations(loop.rollout.seed if seed is None else seed),
        started_s=time.monotonic(),
        time_limit_s=time_limit_s,
        progress=progress,
        work=work_of(loop.rollout),
    )
    axes = known.axes()
    size = axes.size()
    if not size and not known.infeasible:
        raise InputError(_nothing(loop))
    covered: Covered | None = None
    if size <= whole_up_to:
        known.explore(choices(loop, axes.shapes))
    else:
        covered = coarse_to_fine(known, axes)
    refined = True
    for _ in range(_ZOOMS if zoom else 0):
        best = known.best()
        refined = best is None or not known.time_is_up()
        if best is None or not refined or known.left:
            break
        near = near_values(known, best)
        if not any(choice not in known.numbers for choice in near):
            break
        known.explore(near)
    seconds = time.monotonic() - known.started_s
    return result_of(known, covered, top_k, seconds, refined=refined)


def near_values(known: Known, number: int) -> list[Choice]:
    """Returns choices half way from a candidate to its neighbours, one axis at a time."""
    own = known.candidates[number].choice
    out: list[Choice] = []
    alike = [c for c in known.numbers if _same_but(c, own, "stop_fraction")]
    if own.layout != "async" and known.loop.rollout.stop.rule == "lambda":
        for x in between([c.stop_fraction for c in alike], own.stop_fraction):
            out.append(replace(own, stop_fraction=round(x, 4)))
    alike = [c for c in known.numbers if _same_but(c, own, "slots") and c.slots]
    if own.slots and not known.loop.search.slots:
        for x in between([float(c.slots) for c in alike], float(own.slots)):
            out.append(replace(own, slots=round(x)))
    return out


def _same_but(a: Choice, b: Choice, axis: str) -> bool:
    return replace(a, **{axis: getattr(b, axis)}) == b


def _nothing(loop: LoopScenario) -> Violation:
    return Violation(
        field="search",
        rule=f"no choice uses the {loop.num_gpus} GPUs: instances must divide them, and be no "
        f"more than the {loop.rollout.num_attempts} attempts in flight",
        nearest_fix="other gpus, or more of tp, ep and layout in search",
    )
