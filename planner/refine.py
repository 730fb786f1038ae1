"""The finalists, event by event: what the search's replay cannot see.

The replay gives every transfer its own link and has copies to the host inside the actions
that they run beside. The event engine lets transfers share links and copies run on engines
of their own, so that plans close to each other may change places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.ranking import plan_value
from flopwright.planner.result import SearchResult
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.engine.simulate import event_step_seconds
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import GemmRecipe

# Entries of the finalists' lists together: what a few seconds are enough for.
MAX_ENTRIES: Final = 30_000


def refined(
    result: SearchResult,
    variants: Mapping[GemmRecipe | None, Scenario],
    calibration_of: Callable[[Scenario], Calibration],
) -> SearchResult:
    """Returns the result with its best plans timed by the event engine and ranked by that.

    Plans that the engine had no time for keep their places behind them.
    """
    if not result.ranked:
        return result
    scenario = next(iter(variants.values()))
    times = refined_step_times([(variants[p.gemm], p.plan) for p in result.ranked], calibration_of)
    done = [
        plan.model_copy(update={"refined_step_time_s": seconds})
        for plan, seconds in zip(result.ranked, times, strict=False)
    ]
    asked = result.headroom_asked
    done.sort(key=lambda p: (p.headroom < asked, plan_value(scenario, p)))
    ranked = (*done, *result.ranked[len(done) :])
    return result.model_copy(
        update={
            "refined": len(done),
            "ranked": tuple(p.model_copy(update={"rank": i}) for i, p in enumerate(ranked, 1)),
        }
    )


def refined_step_times(
    plans: Sequence[tuple[Scenario, ParallelPlan]],
    calibration_of: Callable[[Scenario], Calibration],
    max_entries: int = MAX_ENTRIES,
) -> tuple[float, ...]:
    """Returns the step times of the first plans from the event engine, best plan first.

    Args:
        max_entries: no plan is begun once so many entries of lists were gone through; the
            first one always is.
    """
    out: list[float] = []
    entries = 0
    for scenario, plan in plans:
        if out and entries >= max_entries:
            break
        seconds, count = event_step_seconds(scenario, plan, calibration_of(scenario))
        out.append(seconds)
        entries += count
    return tuple(out)
