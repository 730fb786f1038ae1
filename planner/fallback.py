"""Plans for a run that lost nodes: the next smaller rank counts that can go on with its batch.

Ranks never plan: whoever supervises them takes the largest fallback that the nodes left can
hold, and starts it from the last checkpoint. The global batch stays, so the run's tokens,
steps and learning rate go on as they were.
"""

from __future__ import annotations

from typing import Final

from flopwright.errors import InputError
from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.predicted import predicted_step
from flopwright.planner.recommend_sizes import node_counts
from flopwright.planner.result import RankedPlan, SearchResult
from flopwright.planner.search import search
from flopwright.simulator.calibration.model import Calibration
from flopwright.spec.base import Spec
from flopwright.spec.load import make_plan_file
from flopwright.spec.scenario import Scenario

COUNT: Final = 3
# Sizes that are planned at most, so that an export ends.
_MAX_TRIED: Final = 6
# A size that keeps so much less than a smaller one busy is not worth a search.
_NEARLY: Final = 0.95
# What a fallback keeps of the plan, so that its search is short and its checkpoint alike; what
# has to hold more on fewer GPUs (stages, experts, recompute, offload) is free.
_KEPT: Final = ("tp", "cp", "micro_batch_size", "zero_stage")


class Fallback(Spec):
    """A plan for fewer ranks.

    Attributes:
        ranks, nodes: what it runs on; nodes_lost: of the exported plan's.
        step_time_s: predicted; slower: by what share of the plan's step it is longer.
        plan: the file, whose scenario has so many nodes.
    """

    ranks: int
    nodes: int
    nodes_lost: int
    step_time_s: float
    slower: float
    peak_memory_bytes: int
    headroom: float
    plan: PlanFile

    @property
    def file(self) -> str:
        """Its name in a bundle."""
        return f"fallback-{self.ranks}.yaml"


def fallbacks(
    plan: PlanFile,
    step_time_s: float,
    calibration: Calibration | None = None,
    count: int = COUNT,
) -> tuple[Fallback, ...]:
    """Returns up to `count` plans on fewer nodes, the largest first.

    On one node, on fewer of its GPUs. A size whose best plan is no faster than that of a
    smaller one is left out: the smaller one is the better use of what is left.

    Args:
        step_time_s: of the plan itself.
    """
    found: list[Fallback] = []
    for scenario in _smaller(plan)[:_MAX_TRIED]:
        if len(found) == count:
            break
        best = _best(scenario, plan.parallel, calibration)
        if best is not None:
            smaller = _fallback(plan, scenario, best, step_time_s)
            found = [f for f in found if f.step_time_s < smaller.step_time_s] + [smaller]
    return tuple(found)


def _smaller(plan: PlanFile) -> list[Scenario]:
    """Returns the scenario on fewer nodes (on one: fewer GPUs), the largest first.

    Only sizes that a plan could fill, and that keep nearly as many GPUs busy as every smaller.
    """
    scenario, gpus = plan.scenario, plan.scenario.cluster.node.gpus
    nodes = -(-plan.parallel.world_size // gpus)
    if nodes > 1:
        sizes = _useful(node_counts(scenario, nodes - 1))
        return [_on(scenario, nodes=n, gpus=gpus) for n in reversed(sizes)]
    one = _on(scenario, nodes=1, gpus=1)
    sizes = _useful(node_counts(one, plan.parallel.world_size - 1))
    return [_on(scenario, nodes=1, gpus=n) for n in reversed(sizes)]


def _useful(sizes: dict[int, float]) -> list[int]:
    """Returns the sizes, but those of which uneven stages leave less than a smaller one has.

    Args:
        sizes: to the largest share of the GPUs that is busy beside the fullest stage.
    """
    kept, busiest = [], 0.0
    for count, even in sizes.items():
        if count * even >= _NEARLY * busiest:
            kept.append(count)
        busiest = max(busiest, count * even)
    return kept


def _on(scenario: Scenario, *, nodes: int, gpus: int) -> Scenario:
    cluster = scenario.cluster
    node = cluster.node.model_copy(update={"gpus": gpus})
    name = f"{nodes * gpus}_{node.gpu.name}"
    cluster = cluster.model_copy(update={"num_nodes": nodes, "node": node, "name": name})
    return scenario.model_copy(update={"cluster": cluster, "objective": "time"})


def _best(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration | None
) -> RankedPlan | None:
    """Returns the best plan that keeps what a fallback keeps, else the best of all."""
    kept = {name: getattr(plan, name) for name in _KEPT}
    for fixed in (kept, {}):
        found = _searched(scenario, fixed, calibration)
        if found is not None and found.best is not None:
            return found.best
    return None


def _searched(
    scenario: Scenario, fixed: dict[str, int], calibration: Calibration | None
) -> SearchResult | None:
    try:
        return search(scenario, calibration, 1, fixed=fixed)
    except InputError:
        return None


def _fallback(
    plan: PlanFile, scenario: Scenario, best: RankedPlan, step_time_s: float
) -> Fallback:
    cluster, was = scenario.cluster, plan.scenario.cluster
    metrics = best.prediction.metrics
    predicted = predicted_step(best.prediction)
    nodes = -(-plan.parallel.world_size // was.node.gpus)
    return Fallback(
        ranks=best.plan.world_size,
        nodes=cluster.num_nodes,
        nodes_lost=nodes - cluster.num_nodes,
        step_time_s=metrics.step_time_s,
        slower=metrics.step_time_s / step_time_s - 1,
        peak_memory_bytes=metrics.peak_memory_bytes,
        headroom=best.headroom,
        plan=make_plan_file(scenario, best.plan, best.plan.label(), predicted),
    )
