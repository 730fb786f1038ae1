"""A first look at a scenario in about a second: the bounds of a thinned space, one plan exact.

For a screen that answers while the whole search (search.py) still runs. The space is the
scenario's own without the finer recompute lists, replicas of shard groups and other expert
shards, and without what another choice hardly ever loses to: layers spread evenly where they
can be spread by weight, and, for experts, schedules that hide no exchange. Plans are ordered
by their bound, and only the best one is replayed. So the answer is a legal plan with its exact
step, but not always the best plan there is.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from flopwright.plan.parallel import ScheduleName
from flopwright.planner.pareto import pareto_front
from flopwright.planner.ranking import (
    Floats,
    Ints,
    Priced,
    best_of_each_layout,
    comfortable,
    headroom,
    layout_ids,
    order,
)
from flopwright.planner.result import RankedPlan, SearchResult, TradeOff
from flopwright.planner.search import price
from flopwright.planner.space import legal_candidates
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.predict import predict
from flopwright.spec.scenario import Scenario

_THINNED: Final = {
    "recompute_tags": (),
    "recompute_layers": (),
    "dp_replicate": (1,),
    "etp": (1,),
}
# On processors that are searched over more than plain pipelines.
_SCHEDULES: Final[dict[str, tuple[ScheduleName, ...]]] = {
    "moe": ("1f1b", "zb_h1", "interleaved_1f1b_overlap", "dualpipe_v"),
    "dense": ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v"),
}
_CHUNKS: Final = (1, 2, 4)
_MAX_FRONT: Final = 50
# Forwards and backwards of a step that are replayed within half a second.
_MOST_ACTIONS: Final = 20_000


def thinned(scenario: Scenario) -> Scenario:
    """Returns the scenario with the axes of its search that matter least left out."""
    own, model = scenario.search, scenario.model
    less: dict[str, object] = dict(_THINNED)
    if scenario.cluster.node.gpu.kind != "cpu":
        less["schedule"] = _SCHEDULES["dense" if model.moe is None else "moe"]
        less["vpp"] = tuple(n for n in _CHUNKS if n <= model.num_layers)
    update = {name: value for name, value in less.items() if not getattr(own, name)}
    return scenario.model_copy(update={"search": own.model_copy(update=update)})


def quick_look(scenario: Scenario, calibration: Calibration) -> SearchResult | None:
    """Returns the plan of the least bound with its exact step, and the front of the bounds.

    None where no plan of the thinned space fits: then only the whole search can say more.

    Raises:
        InputError: no plan is legal, with every rule that stands against the nearest one.
    """
    candidates = _spread_by_weight(legal_candidates(thinned(scenario), None))
    priced = price(scenario, candidates, calibration)
    if not priced.fits.any():
        return None
    ids = layout_ids(candidates)
    best = _best(priced, scenario, ids)
    plan = candidates.plan(best)
    prediction, _ = predict(scenario, plan, calibration, name=plan.label(), whole_trace=False)
    free = headroom(priced, scenario)
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
            for i in _front(priced, free)[:_MAX_FRONT]
        ),
    )


def _front(priced: Priced, free: Floats) -> Ints:
    """Returns the candidates that fit and that no other beats in time, memory and cost."""
    fits, step_s = np.flatnonzero(priced.fits), priced.step_time_s
    cost = step_s * priced.candidates.world_size
    return np.asarray(fits[pareto_front(step_s[fits], -free[fits], cost[fits])])


def _best(priced: Priced, scenario: Scenario, ids: Ints) -> int:
    """Returns the best candidate by its bound whose step is replayed at once, where there is one.

    The plan that holds least, say, may run thousands of micro-batches through many stages.
    """
    ordered = best_of_each_layout(order(priced, scenario), ids)
    c, good = priced.candidates, comfortable(priced, scenario)
    batches = c.num_microbatches(scenario.workload.global_batch_size)
    short = 2 * c.pp * c.vpp * batches <= _MOST_ACTIONS
    few = ordered[(short & priced.fits & (good == good[ordered[0]]))[ordered]]
    return int(few[0] if len(few) else ordered[0])


def _spread_by_weight(candidates: Candidates) -> Candidates:
    """Returns the candidates without those spread evenly whose layers can be spread by weight."""
    chunks, even = candidates.pp * candidates.vpp, candidates.layout < 0
    return candidates.take(~(even & np.isin(chunks, chunks[~even])))
