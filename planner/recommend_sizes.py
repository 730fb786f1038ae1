"""Which cluster sizes could meet a deadline or a budget, before any of them is planned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from flopwright.errors import InputError, Violation, divisors
from flopwright.planner.whole_run import WholeRun, days_at_rate
from flopwright.spec.cluster import MAX_GPUS
from flopwright.spec.flops import model_flops_per_token
from flopwright.spec.scenario import Scenario
from flopwright.units import plural

# Without a limit of the user's, so many times the scenario's own cluster is looked at.
GROWTH: Final = 8
DAY_S: Final = 86_400.0
# Ranks that context parallelism may add to a plan.
_CONTEXT_RANKS: Final = (1, 2, 4, 8, 16)
_MAX_VPP: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a run must meet.

    Attributes:
        deadline_s, budget_usd: None where it does not matter; one is given at least.
        sure: judge the run by the high end of its 80 % interval, not by its middle.
        max_gpus: the largest cluster looked at; None is eight times the scenario's own.
        every_size: plan every size that was stepped over too.
    """

    deadline_s: float | None = None
    budget_usd: float | None = None
    sure: bool = False
    max_gpus: int | None = None
    every_size: bool = False


def with_nodes(scenario: Scenario, num_nodes: int) -> Scenario:
    """Returns the scenario on another number of the same nodes, all of them used."""
    cluster = scenario.cluster
    name = f"{num_nodes * cluster.node.gpus}_{cluster.node.gpu.name}"
    update = {"num_nodes": num_nodes, "name": name}
    if num_nodes == cluster.num_nodes:
        update = {}
    cluster = cluster.model_copy(update=update)
    return scenario.model_copy(update={"cluster": cluster, "objective": "time"})


def node_counts(scenario: Scenario, most: int) -> dict[int, float]:
    """Returns the numbers of nodes up to `most` that some legal plan could fill, sorted.

    A plan's ranks are tp * pp * cp * dp with dp a divisor of the batch and pp at most the
    layers; other numbers of nodes have none.

    Returns:
        By number of nodes the largest share of the GPUs that is busy while the fullest stage
        works: what uneven stages leave of it.
    """
    model, batch = scenario.model, scenario.workload.global_batch_size
    gpus = scenario.cluster.node.gpus
    tps = scenario.search.tp or divisors(model.common_heads)
    pps = scenario.search.pp or range(1, model.num_layers + 1)
    vpps = scenario.search.vpp or range(1, _MAX_VPP + 1)
    shards: dict[int, float] = {}
    for pp in pps:
        even = max(_evenness(model.num_layers, pp * vpp) for vpp in vpps)
        for shard in {tp * pp * cp for tp in tps for cp in _CONTEXT_RANKS}:
            shards[shard] = max(even, shards.get(shard, 0.0))
    nodes: dict[int, float] = {}
    for dp in divisors(batch):
        for shard, even in shards.items():
            count, rest = divmod(shard * dp, gpus)
            if rest == 0 and count <= most:
                nodes[count] = max(even, nodes.get(count, 0.0))
    return dict(sorted(nodes.items()))


def _evenness(layers: int, chunks: int) -> float:
    """Returns the mean layers of a chunk over those of the fullest; 0 for more than layers."""
    return layers / (chunks * -(-layers // chunks)) if chunks <= layers else 0.0


def growing(nodes: dict[int, float]) -> list[int]:
    """Returns the sizes that keep more GPUs busy than every smaller one.

    The others (47 nodes, of which one stage of two layers is the pace) lose to a smaller one.
    """
    sizes, busiest = [], 0.0
    for count, even in nodes.items():
        if count * even > busiest:
            sizes.append(count)
            busiest = count * even
    return sizes


def sizes_of(scenario: Scenario, goal: Goal) -> dict[int, float]:
    """Returns the numbers of nodes that could be planned, as `node_counts`.

    Raises:
        InputError: a budget without a price, or a limit below one node.
    """
    cluster = scenario.cluster
    if goal.budget_usd is not None and cluster.price_usd_per_gpu_h is None:
        fix = "add price_per_gpu and price_source to the cluster"
        rule = "a budget needs the price of a GPU hour"
        raise InputError(Violation(field="cluster.price_per_gpu", rule=rule, nearest_fix=fix))
    most = goal.max_gpus or GROWTH * cluster.num_gpus
    if cluster.network is None:
        most = min(most, cluster.node.domain_gpus)
    most_nodes = min(most, MAX_GPUS) // cluster.node.gpus
    sizes = node_counts(scenario, most_nodes)
    if not sizes:
        limit = plural(cluster.node.gpus, "GPU")
        rule = "no number of whole nodes up to it can share the batch"
        raise InputError(Violation(field="max_gpus", value=str(most), rule=rule, limit=limit))
    return sizes


def days_of(run: WholeRun, sure: bool) -> float:
    """Returns the days of a run; at the high end of its interval where it must be sure."""
    return run.days_interval.high if sure else run.days


def usd_of(run: WholeRun, sure: bool) -> float | None:
    """Returns the money of a run, in proportion to its days."""
    return None if run.usd is None else run.usd * days_of(run, sure) / run.days


def least_nodes(scenario: Scenario, goal: Goal) -> int:
    """Returns the nodes below which even the datasheet's peak is too slow for the deadline."""
    workload, node = scenario.workload, scenario.cluster.node
    if goal.deadline_s is None or workload.lora_rank is not None:
        return 1  # frozen weights have no gradient products: 6 N would be too much
    tokens = workload.num_steps * workload.tokens_per_step
    flops = tokens * model_flops_per_token(scenario.model, workload.seq_len)
    days = days_at_rate(flops, max(node.gpu.peak_flops_per_s.values()), node.gpus)
    return max(1, math.ceil(days * DAY_S / goal.deadline_s))


def show_usd(usd: float) -> str:
    """Returns money for people: whole dollars, or three digits of less than a hundred."""
    return f"{usd:,.0f} USD" if usd >= 100 else f"{usd:.3g} USD"
