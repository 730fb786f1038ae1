"""The planner's own plan for a published run that does not state all of its split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.space import FIXABLE, legal_candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.scenario import Scenario

# Means that published runs name where they use them; a silent run used none.
_SILENT: Final = {
    "fp8_activations": False,
    "activation_offload": False,
    "optimizer_offload": False,
}
# What every framework of those runs could do; a finer choice would be named.
_USUAL: Final[dict[str, Any]] = {
    "schedule": ("1f1b", "interleaved_1f1b"),
    "recompute_tags": (),
    "recompute_layers": (),
    "cp": (1,),
    "etp": (1,),
    "dp_replicate": (1,),
}


def own_plan(scenario: Scenario, known: Mapping[str, int]) -> ParallelPlan | None:
    """Returns the fastest plan that fits memory, with what the run does state kept.

    Args:
        known: axes by the planner's names.

    Returns:
        None where no legal plan fits, or no plan is legal.
    """
    scenario = scenario.model_copy(update={"search": scenario.search.model_copy(update=_USUAL)})
    fixed = {**_SILENT, **{name: value for name, value in known.items() if name in FIXABLE}}
    try:
        candidates = legal_candidates(scenario, fixed)
        found = evaluate(scenario, candidates)
    except InputError:
        return None
    seconds = np.where(found.fits, found.step_time_s, np.inf)
    best = int(np.argmin(seconds))
    return candidates.plan(best) if np.isfinite(seconds[best]) else None
