"""The search space: every legal candidate of a scenario, as one struct of arrays.

A list that the scenario's `search` leaves empty means every legal value, within the bounds
named here; `fixed` fields replace both. What is left out on purpose: tensor parallelism
beyond a node, context parallelism (unless fixed), GPipe (1F1B takes the same time and holds
fewer micro-batches).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.errors import InputError, Violation, did_you_mean, divisors
from flopwright.plan.parallel import even_split
from flopwright.planner.constraints import RULES, broken_rules, legal, violations
from flopwright.simulator.training.candidates import CONTEXTS, RECOMPUTES, SCHEDULES, Candidates
from flopwright.spec.cluster import MAX_GPUS, NodeSpec
from flopwright.spec.model import MAX_LAYERS
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import MAX_BATCH

MAX_VPP: Final = 4
# Points of the raw product: more would not fit in memory.
MAX_POINTS: Final = 10_000_000
_RANGES: Final = {
    "zero_stage": (0, 3),
    "micro_batch_size": (1, MAX_BATCH),
    "recompute_layers": (0, MAX_LAYERS),
}
MAX_MICRO_BATCH_SIZE: Final = 16
Fixed = Mapping[str, int | str | bool]
Ints = NDArray[np.int64]

_AXES: Final = (
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "micro_batch_size",
    "zero_stage",
    "recompute",
    "fp8_activations",
    "activation_offload",
    "optimizer_offload",
    "split",
    "world",
)
# Fields that the search leaves at their defaults unless they are fixed.
_BESIDE: Final = (
    "etp",
    "sequence_parallel",
    "context_parallel",
    "recompute_layers",
    "gradient_offload",
    "parameter_offload",
)
FIXABLE: Final = (
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "dp",
    "dp_replicate",
    "micro_batch_size",
    "zero_stage",
    "recompute",
    "schedule",
    "fp8_activations",
    "activation_offload",
    "optimizer_offload",
    *_BESIDE,
)


def light_ends_split(num_layers: int, chunks: int) -> tuple[int, ...]:
    """Returns layers per chunk with a light chunk first and the other light ones last.

    The first stage also holds the embedding, the last one the head and the loss. With
    one light chunk it goes first (even_split puts it last).
    """
    base, extra = divmod(num_layers, chunks)
    if extra == 0:
        return even_split(num_layers, chunks)
    light = chunks - extra
    return (base, *(base + 1,) * extra, *(base,) * (light - 1))


def legal_candidates(scenario: Scenario, fixed: Fixed | None = None) -> Candidates:
    """Returns every legal candidate, in a fixed order.

    Args:
        scenario: its `search` lists bound the space.
        fixed: values by field name of ParallelPlan (or "dp") that every candidate must have.

    Raises:
        InputError: no candidate is legal; every rule that the nearest one breaks.
    """
    fixed = _checked(fixed or {})
    every = _product(scenario, fixed)
    mask = legal(every, scenario)
    if mask.any():
        return every.take(mask)
    count = np.sum(list(broken_rules(every, scenario).values()), axis=0)
    nearest = every.plan(int(np.argmin(count)))
    raise InputError(violations(nearest, scenario))


def rule_counts(scenario: Scenario, fixed: Fixed | None = None) -> dict[str, int]:
    """Returns how many points of the raw product each rule refuses (rules overlap)."""
    every = _product(scenario, _checked(fixed or {}))
    broken = broken_rules(every, scenario)
    return {rule.name: int(broken[rule.name].sum()) for rule in RULES}


def _checked(fixed: Fixed) -> dict[str, int]:
    found, out = [], {}
    choices: dict[str, tuple[str, ...]] = {
        "recompute": RECOMPUTES,
        "schedule": SCHEDULES,
        "context_parallel": CONTEXTS,
    }
    for name, value in fixed.items():
        if name not in FIXABLE:
            found.append(
                Violation(
                    field=name, rule="cannot be fixed", nearest_fix=did_you_mean(name, FIXABLE)
                )
            )
        elif name in choices:
            if value in choices[name]:
                out[name] = choices[name].index(str(value))
                continue
            fix = did_you_mean(str(value), choices[name])
            found.append(
                Violation(
                    field=name, value=str(value), rule="not one of the choices", nearest_fix=fix
                )
            )
        else:
            least, most = _RANGES.get(name, (0, 1) if isinstance(value, bool) else (1, MAX_GPUS))
            out[name] = int(value)
            if not least <= out[name] <= most:
                limit = f"{least} to {most}"
                found.append(
                    Violation(field=name, value=str(value), rule="out of range", limit=limit)
                )
    if found:
        raise InputError(found)
    return out


def _axis_values(scenario: Scenario, fixed: dict[str, int]) -> dict[str, Sequence[int]]:
    search, model, cluster = scenario.search, scenario.model, scenario.cluster
    gpus = cluster.num_gpus
    moe = model.moe
    cuda = cluster.node.gpu.kind != "cpu"
    offload = (0, 1) if cuda and cluster.node.host_link is not None else (0,)
    batch = scenario.workload.global_batch_size
    values: dict[str, Sequence[int]] = {
        "tp": search.tp or _tensor_parallel(cluster.node, model.attention.num_heads),
        "pp": search.pp or [d for d in divisors(gpus) if d <= model.num_layers],
        "vpp": search.vpp or range(1, min(MAX_VPP, model.num_layers) + 1),
        "cp": (1,),
        "ep": search.ep or (divisors(math.gcd(moe.num_experts, gpus)) if moe else (1,)),
        "micro_batch_size": search.micro_batch_size
        or [d for d in divisors(batch) if d <= MAX_MICRO_BATCH_SIZE],
        "zero_stage": search.zero_stage,
        "recompute": [RECOMPUTES.index(r) for r in search.recompute],
        "fp8_activations": (0, 1) if cuda and "fp8" in cluster.node.gpu.peak_flops_per_s else (0,),
        "activation_offload": offload,
        "optimizer_offload": offload,
        "split": (0, 1),
        "world": _world_sizes(scenario),
    }
    values |= {name: (fixed[name],) for name in _AXES if name in fixed}
    values = {name: list(dict.fromkeys(column)) for name, column in values.items()}
    _check_size(values, fixed, gpus)
    return values


def _check_size(values: dict[str, Sequence[int]], fixed: dict[str, int], gpus: int) -> None:
    """Raises InputError where the product cannot be held: too many points or ranks."""
    ranks = max(1, fixed.get("dp", 1), fixed.get("dp_replicate", 1))
    ranks *= math.prod(max(values[name]) for name in ("tp", "pp", "cp"))
    if ranks >= 2**62:
        raise InputError(
            Violation(
                field="parallel.world_size",
                value=f"up to {ranks}",
                rule="dp_replicate*dp_shard*tp*cp*pp must not exceed the cluster's GPUs",
                limit=str(gpus),
            )
        )
    points = math.prod(map(len, values.values()))
    if points > MAX_POINTS:
        lists = ("tp", "pp", "ep", "vpp", "micro_batch_size", "recompute")
        longest = max(lists, key=lambda name: len(values[name]))
        raise InputError(
            Violation(
                field="search",
                value=f"{points:,} combinations",
                rule="too many to price",
                limit=f"{MAX_POINTS:,}",
                nearest_fix=f"shorten search.{longest} ({len(values[longest])} values)",
            )
        )


def _world_sizes(scenario: Scenario) -> list[int]:
    """Returns the GPU counts tried: all of them, or for cost also halves of the cluster."""
    gpus = scenario.cluster.num_gpus
    if scenario.objective == "time":
        return [gpus]
    return [gpus >> k for k in range(gpus.bit_length()) if gpus % (1 << k) == 0]


def _product(scenario: Scenario, fixed: dict[str, int]) -> Candidates:
    """Returns the raw product of all axes, legal or not, dp following from the world size."""
    values = _axis_values(scenario, fixed)
    grid = np.meshgrid(*(np.array(values[n], np.int64) for n in _AXES), indexing="ij")
    axes = {name: column.ravel() for name, column in zip(_AXES, grid, strict=True)}
    axes |= {n: np.full_like(axes["tp"], fixed[n]) for n in _BESIDE if n in fixed}
    axes, layouts = _with_layouts(axes, scenario.model.num_layers)
    world = axes.pop("world")
    model_ranks = axes["tp"] * axes["pp"] * axes["cp"]
    dp = np.full_like(world, fixed["dp"]) if "dp" in fixed else np.maximum(world // model_ranks, 1)
    interleaved, plain = SCHEDULES.index("interleaved_1f1b"), SCHEDULES.index("1f1b")
    axes["schedule"] = np.where(axes["vpp"] > 1, interleaved, plain)
    if "schedule" in fixed:
        axes["schedule"] = np.full_like(dp, fixed["schedule"])
    if "dp_replicate" in fixed:
        replicas = np.full_like(dp, fixed["dp_replicate"])
        shard = np.maximum(dp // replicas, 1)
        return Candidates.build(layouts, (), **axes, dp_replicate=replicas, dp_shard=shard)
    return _with_replicas(axes, dp, layouts, scenario)


def _with_layouts(
    axes: dict[str, Ints], num_layers: int
) -> tuple[dict[str, Ints], tuple[tuple[int, ...], ...]]:
    """Turns the split axis into layouts; a split that equals the even one is dropped."""
    chunks = axes["pp"] * axes["vpp"]
    table = {
        int(n): light_ends_split(num_layers, int(n))
        for n in np.unique(chunks)
        if 1 < n <= num_layers
    }
    table = {n: split for n, split in table.items() if split != even_split(num_layers, n)}
    index = {n: i for i, n in enumerate(table)}
    layout = np.full_like(chunks, -1)
    for n, i in index.items():
        layout[(chunks == n) & (axes["split"] == 1)] = i
    keep = (axes["split"] == 0) | (layout >= 0)
    out = {name: column[keep] for name, column in axes.items() if name != "split"}
    return out | {"layout": layout[keep]}, tuple(table.values())


def _tensor_parallel(node: NodeSpec, heads: int) -> list[int]:
    """Returns the head counts' divisors that divide a node or fill nodes of one NVLink domain."""
    return [
        tp
        for tp in divisors(heads)
        if node.gpus % tp == 0 or (tp % node.gpus == 0 and tp <= node.domain_gpus)
    ]


def _with_replicas(
    axes: dict[str, Ints], dp: Ints, layouts: tuple[tuple[int, ...], ...], scenario: Scenario
) -> Candidates:
    """Adds hybrid sharding for ZeRO-2 and 3: shard groups of whole nodes, replicated."""
    index, replicas = np.arange(len(dp)), np.ones_like(dp)
    hybrid = np.flatnonzero((axes["zero_stage"] >= 2) & (axes["pp"] == 1))
    node = scenario.cluster.node.gpus
    for count in divisors(scenario.cluster.num_nodes)[1:]:
        whole = hybrid[
            (dp[hybrid] % count == 0) & (dp[hybrid] // count * axes["tp"][hybrid] >= node)
        ]
        index = np.concatenate([index, whole])
        replicas = np.concatenate([replicas, np.full(len(whole), count)])
    columns = {name: column[index] for name, column in axes.items()}
    return Candidates.build(
        layouts, (), **columns, dp_replicate=replicas, dp_shard=dp[index] // replicas
    )
