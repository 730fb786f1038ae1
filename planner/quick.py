"""A first look at a scenario in about a second: the bounds of a thinned space, one plan exact.

For a screen that answers while the whole search (search.py) still runs. The space is the
scenario's own without the finer recompute lists, replicas of shard groups and other expert
shards; plans are ordered by their bound, and only the best one is replayed. So the answer is
a legal plan with its exact step, but not always the best plan there is.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from flopwright.planner.pareto import pareto_front
from flopwright.planner.ranking import best_of_each_layout, headroom, layout_ids, order
from flopwright.planner.result import RankedPlan, SearchResult, TradeOff
from flopwright.planner.search import price
from flopwright.planner.space import legal_candidates
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.predict import predict
from flopwright.spec.scenario import Scenario

_THINNED: Final = {
    "recompute_tags": (),
    "recompute_layers": (),
    "dp_replicate": (1,),
    "etp": (1,),
}
_MAX_FRONT: Final = 50


def thinned(scenario: Scenario) -> Scenario:
    """Returns the scenario with the axes of its search that matter least left out."""
    own = scenario.search
    update = {name: value for name, value in _THINNED.items() if not getattr(own, name)}
    return scenario.model_copy(update={"search": own.model_copy(update=update)})


def quick_look(scenario: Scenario, calibration: Calibration) -> SearchResult | None:
    """Returns the plan of the least bound with its exact step, and the front of the bounds.

    None where no plan of the thinned space fits: then only the whole search can say more.

    Raises:
        InputError: no plan is legal, with every rule that stands against the nearest one.
    """
    candidates = legal_candidates(thinned(scenario), None)
    priced = price(scenario, candidates, calibration)
    if not priced.fits.any():
        return None
    ids = layout_ids(candidates)
    best = int(best_of_each_layout(order(priced, scenario), ids)[0])
    plan = candidates.plan(best)
    prediction, _ = predict(scenario, plan, calibration, name=plan.label(), whole_trace=False)
    free = headroom(priced, scenario)
    fitting = np.flatnonzero(priced.fits)
    cost = priced.step_time_s * candidates.world_size
    front = fitting[pareto_front(priced.step_time_s[fitting], -free[fitting], cost[fitting])]
    return SearchResult(
        verdict="fits" if free[best] >= scenario.search.memory_headroom else "tight",
        candidates=len(candidates),
        fit=int(priced.fits.sum()),
        replayed=1,
        proved=False,
        headroom_asked=scenario.search.memory_headroom,
        ranked=(
            RankedPlan(
                rank=1,
                plan=plan,
                prediction=prediction,
                headroom=float(free[best]),
                variants=int((ids[priced.fits] == ids[best]).sum()),
            ),
        ),
        front=tuple(
            TradeOff(
                plan=candidates.plan(int(i)),
                step_time_s=float(priced.step_time_s[i]),
                headroom=float(free[i]),
                gpus=int(candidates.world_size[i]),
            )
            for i in front[:_MAX_FRONT]
        ),
    )
