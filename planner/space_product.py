"""The raw product of a scenario's axes: shapes first, memory policies only for legal shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.errors import InputError, Violation, divisors
from flopwright.plan.parallel import even_split
from flopwright.planner.space_axes import (
    AS_TP,
    BALANCED,
    HALF,
    LIGHT_ENDS,
    Fixed,
    Policy,
    policies,
    recompute_lists,
    schedules_with_chunks,
    shape_axes,
)
from flopwright.simulator.training.candidates import SCHEDULES, Candidates
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import layer_parameters
from flopwright.spec.scenario import Scenario

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Points of a product: more would not fit in memory.
MAX_POINTS: Final = 10_000_000
_PLAIN, _OVERLAP = SCHEDULES.index("1f1b"), SCHEDULES.index("interleaved_1f1b_overlap")


@dataclass(frozen=True, slots=True)
class Space:
    """The axes of a search.

    Attributes:
        shapes: every way to cut the model and order its work, legal or not, without a policy.
        policies: every memory policy.
    """

    scenario: Scenario
    shapes: Candidates
    policies: tuple[Policy, ...]

    def cross(self, index: Ints, policy: Sequence[Policy] | None = None) -> Candidates:
        """Returns the shapes at `index`, each with every policy; shapes are the outer axis."""
        chosen = self.policies if policy is None else policy
        if len(index) * len(chosen) > MAX_POINTS:
            raise InputError(_too_many(len(index) * len(chosen), "recompute", len(chosen)))
        rows = np.repeat(np.asarray(index), len(chosen))
        columns = {
            name: np.tile(np.array([getattr(p, name) for p in chosen], np.int64), len(index))
            for name in Policy.__slots__
        }
        few = self.shapes.take(rows)
        layers, chunks = self.scenario.model.num_layers, few.pp * few.vpp
        half = ((layers + chunks - 1) // chunks + 1) // 2
        depth = columns["recompute_layers"]
        columns["recompute_layers"] = np.where(depth == HALF, half, depth)
        return few.with_axes(**columns)


def space_of(scenario: Scenario, fixed: Fixed, tags: tuple[str, ...] | None = None) -> Space:
    """Returns the axes of a scenario's search.

    Args:
        fixed: values that every plan must have, by axis; tags: their recompute list.

    Raises:
        InputError: more points than memory holds.
    """
    lists = recompute_lists(scenario, tags)
    values = shape_axes(scenario, fixed)
    _check_size(values, fixed, scenario.cluster.num_gpus)
    found = policies(scenario, fixed, lists)
    return Space(scenario, _shapes(scenario, values, fixed, lists), tuple(found))


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


def tail_layers(model: ModelSpec) -> float:
    """Returns how many layers the head and prediction modules weigh, by weights a token meets."""
    middle = model.num_layers // 2
    layer = 0.0
    for tensor in layer_parameters(model, middle):
        expert = tensor.role == "expert" and model.moe is not None
        share = model.moe.top_k / model.moe.num_experts if expert and model.moe else 1.0
        layer += tensor.numel * share
    head = model.vocab_size * model.hidden_size / layer
    return float(head * (1 + model.mtp_layers) + model.mtp_layers)


def balanced_split(num_layers: int, chunks: int, tail: float) -> tuple[int, ...]:
    """Returns layers per chunk with so many less on the last one as its tail weighs.

    The others share the rest as `light_ends_split` has it.

    Args:
        tail: what the last chunk holds beside layers, in layers.
    """
    last = max(0, min(round((num_layers + tail) / chunks - tail), num_layers // chunks))
    return (*light_ends_split(num_layers - last, chunks - 1), last)


def _check_size(values: dict[str, Sequence[int]], fixed: Fixed, gpus: int) -> None:
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
        lists = ("tp", "pp", "cp", "ep", "etp", "vpp", "schedule", "micro_batch_size")
        longest = max(lists, key=lambda name: len(values[name]))
        raise InputError(_too_many(points, longest, len(values[longest])))


def _too_many(points: int, axis: str, count: int) -> Violation:
    return Violation(
        field="search",
        value=f"{points:,} combinations",
        rule="too many to price",
        limit=f"{MAX_POINTS:,}",
        nearest_fix=f"shorten search.{axis} ({count} values)",
    )


def _shapes(
    scenario: Scenario,
    values: dict[str, Sequence[int]],
    fixed: Fixed,
    lists: Sequence[tuple[str, ...]],
) -> Candidates:
    axes = _grid(values)
    axes |= {n: np.full_like(axes["tp"], fixed[n]) for n in ("data_parallel",) if n in fixed}
    axes, layouts = _with_layouts(axes, scenario.model)
    world = axes.pop("world")
    ranks = axes["tp"] * axes["pp"] * axes["cp"]
    dp = np.full_like(world, fixed["dp"]) if "dp" in fixed else np.maximum(world // ranks, 1)
    index, replicas = _replicas(scenario, axes, dp, fixed)
    columns = {name: column[index] for name, column in axes.items()}
    shard = np.maximum(dp[index] // replicas, 1)
    return Candidates.build(
        layouts, tuple(lists), **columns, dp_replicate=replicas, dp_shard=shard
    )


def _grid(values: dict[str, Sequence[int]]) -> dict[str, Ints]:
    """Returns the product of all axes without what only repeats another point."""
    pairs = schedules_with_chunks(values)
    names = [n for n in values if n not in ("schedule", "vpp")]
    grid = np.meshgrid(
        *(np.array(values[n], np.int64) for n in names), np.arange(len(pairs)), indexing="ij"
    )
    axes = {name: column.ravel() for name, column in zip(names, grid, strict=False)}
    schedule, vpp = np.array(pairs, np.int64).T
    axes["schedule"], axes["vpp"] = schedule[grid[-1].ravel()], vpp[grid[-1].ravel()]
    keep = (axes["cp"] > 1) | (axes["context_parallel"] == values["context_parallel"][0])
    keep &= (axes["tp"] > 1) | (axes["etp"] != AS_TP)
    keep &= (axes["tp"] > 1) | (axes["sequence_parallel"] == max(values["sequence_parallel"]))
    if len(values["schedule"]) > 1:
        # Without a pipeline there is nothing to order, without an exchange nothing to hide.
        plain = _PLAIN in values["schedule"]
        keep &= (axes["pp"] > 1) | (axes["schedule"] == _PLAIN) | (not plain)
        keep &= (axes["ep"] > 1) | (axes["schedule"] != _OVERLAP)
    axes = {name: column[keep] for name, column in axes.items()}
    axes["etp"] = np.where(axes["etp"] == AS_TP, axes["tp"], axes["etp"])
    return axes


def _with_layouts(
    axes: dict[str, Ints], model: ModelSpec
) -> tuple[dict[str, Ints], tuple[tuple[int, ...], ...]]:
    """Turns the split axis into layouts; a split that equals an earlier one is dropped."""
    chunks, layers, tail = axes["pp"] * axes["vpp"], model.num_layers, tail_layers(model)
    table: dict[tuple[int, int], int] = {}
    layouts: list[tuple[int, ...]] = []
    for n in (int(n) for n in np.unique(chunks) if 1 < n <= layers):
        seen = [even_split(layers, n)]
        for kind, split in (
            (LIGHT_ENDS, light_ends_split(layers, n)),
            (BALANCED, balanced_split(layers, n, tail)),
        ):
            if split not in seen:
                table[kind, n] = len(layouts)
                layouts.append(split)
                seen.append(split)
    layout = np.full_like(chunks, -1)
    for (kind, n), i in table.items():
        layout[(chunks == n) & (axes["split"] == kind)] = i
    keep = (axes["split"] == 0) | (layout >= 0)
    out = {name: column[keep] for name, column in axes.items() if name != "split"}
    return out | {"layout": layout[keep]}, tuple(layouts)


def _replicas(
    scenario: Scenario, axes: dict[str, Ints], dp: Ints, fixed: Fixed
) -> tuple[Ints, Ints]:
    """Returns (point, dp_replicate): each point without replicas, and with hybrid sharding.

    Without a list of its own: ZeRO-2 and 3 without a pipeline are tried with shard groups of
    whole nodes, any number of them; ZeRO-1 on GPUs with the smallest group of whole nodes
    that also holds an expert group.
    """
    points = np.arange(len(dp))
    if "dp_replicate" in fixed:
        return points, np.full_like(dp, fixed["dp_replicate"])
    given = scenario.search.dp_replicate
    if given:
        counts = [np.full_like(dp, count) for count in given]
        fits = [(dp % c == 0) & ((axes["zero_stage"] > 0) | (c == 1)) for c in counts]
    else:
        counts, fits = _hybrid(scenario, axes, dp)
    index = np.concatenate([points[fit] for fit in fits])
    replicas = np.concatenate([c[fit] for c, fit in zip(counts, fits, strict=True)])
    return index, replicas


def _hybrid(scenario: Scenario, axes: dict[str, Ints], dp: Ints) -> tuple[list[Ints], list[Bools]]:
    node, gpu = scenario.cluster.node, scenario.cluster.node.gpu
    counts, fits = [np.ones_like(dp)], [np.ones(len(dp), bool)]
    sharded = (axes["zero_stage"] >= 2) & (axes["pp"] == 1)
    for count in divisors(scenario.cluster.num_nodes)[1:]:
        counts.append(np.full_like(dp, count))
        whole = dp // count * axes["tp"] >= node.gpus
        fits.append(sharded & (dp % count == 0) & whole)
    if gpu.kind != "cpu":
        group = np.maximum(axes["ep"] * axes["etp"], node.domain_gpus)
        ranks = dp * axes["cp"] * axes["tp"]
        counts.append(np.maximum(ranks // group, 1))
        exact = (counts[-1] * group == ranks) & (dp % counts[-1] == 0)
        fits.append(exact & (counts[-1] > 1) & (axes["zero_stage"] == 1))
    return counts, fits
