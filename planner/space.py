"""The search space: every legal candidate of a scenario, as one struct of arrays.

A list that the scenario's `search` leaves empty means every legal value, within the bounds
of space_axes.py; `fixed` fields replace both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.plan.parallel import RECOMPUTE_TAGS
from flopwright.planner.constraints import (
    MEMORY_RULES,
    RULES,
    broken_rules,
    legal,
    violations,
)
from flopwright.planner.space_product import MAX_POINTS as MAX_POINTS
from flopwright.planner.space_product import Ints, Space, space_of
from flopwright.planner.space_product import light_ends_split as light_ends_split
from flopwright.simulator.training.candidates import CONTEXTS, RECOMPUTES, SCHEDULES, Candidates
from flopwright.spec.cluster import MAX_GPUS
from flopwright.spec.model import MAX_LAYERS
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import MAX_BATCH

Fixed = Mapping[str, int | str | bool]
_RANGES: Final = {
    "zero_stage": (0, 3),
    "micro_batch_size": (1, MAX_BATCH),
    "recompute_layers": (0, MAX_LAYERS),
}
_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "recompute": RECOMPUTES,
    "schedule": SCHEDULES,
    "context_parallel": CONTEXTS,
}
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
    "etp",
    "sequence_parallel",
    "context_parallel",
    "recompute_tags",
    "recompute_layers",
    "gradient_offload",
    "parameter_offload",
    "fused_loss",
)
# Candidates that are priced at most: a few gigabytes and half a minute.
MAX_PRICED: Final = 3_000_000
# Shapes that are crossed with policies at once where every point is looked at.
_CHUNK: Final = 4096


def legal_candidates(scenario: Scenario, fixed: Fixed | None = None) -> Candidates:
    """Returns every legal candidate, in a fixed order; of too many a sample (see `sampled_of`).

    Args:
        scenario: its `search` lists bound the space.
        fixed: values by field name of ParallelPlan (or "dp") that every candidate must have;
            recompute_tags as one text, "core_attn,moe_act".

    Raises:
        InputError: no candidate is legal; every rule that the nearest one breaks.
    """
    space = _space(scenario, fixed)
    shapes = np.flatnonzero(legal(space.shapes, scenario))
    if len(shapes):
        every = space.cross(_sample(shapes, len(space.policies)))
        mask = legal(every, scenario, MEMORY_RULES)
        if mask.any():
            return every.take(mask)
    raise InputError(violations(_nearest(space, shapes).plan(0), scenario))


def sampled_of(scenario: Scenario, fixed: Fixed | None = None) -> int:
    """Returns how many points a sample is of; 0 where every point is looked at.

    Points are legal shapes times memory policies. Beyond MAX_PRICED, shapes are drawn, always
    the same ones, each with all its policies.
    """
    space = _space(scenario, fixed)
    points = int(legal(space.shapes, scenario).sum()) * len(space.policies)
    return points if points > MAX_PRICED else 0


def _sample(shapes: Ints, policies: int) -> Ints:
    most = max(1, MAX_PRICED // policies)
    if len(shapes) <= most:
        return shapes
    return np.sort(np.random.default_rng(0).choice(shapes, most, replace=False))


def rule_counts(scenario: Scenario, fixed: Fixed | None = None) -> dict[str, int]:
    """Returns how many points of the raw product each rule refuses (rules overlap)."""
    space = _space(scenario, fixed)
    counts = dict.fromkeys((rule.name for rule in RULES), 0)
    for start in range(0, len(space.shapes), _CHUNK):
        part = np.arange(start, min(start + _CHUNK, len(space.shapes)))
        for name, broken in broken_rules(space.cross(part), scenario).items():
            counts[name] += int(broken.sum())
    return counts


def _nearest(space: Space, shapes: Ints) -> Candidates:
    """Returns the point, as one candidate, that breaks the fewest rules."""
    if not len(shapes):
        broken = broken_rules(space.shapes, space.scenario)
        shapes = np.array([int(np.argmin(np.sum(list(broken.values()), axis=0)))])
    every = space.cross(shapes[:_CHUNK])
    count = np.sum(list(broken_rules(every, space.scenario).values()), axis=0)
    return every.take([int(np.argmin(count))])


def _space(scenario: Scenario, fixed: Fixed | None) -> Space:
    codes, tags = _checked(fixed or {})
    return space_of(scenario, codes, tags)


def _checked(fixed: Fixed) -> tuple[dict[str, int], tuple[str, ...] | None]:
    """Returns the fixed values as codes, and the recompute list where one is fixed."""
    found: list[Violation] = []
    out: dict[str, int] = {}
    tags: tuple[str, ...] | None = None
    for name, value in fixed.items():
        if name not in FIXABLE:
            fix = did_you_mean(name, FIXABLE)
            found.append(Violation(field=name, rule="cannot be fixed", nearest_fix=fix))
        elif name == "recompute_tags":
            tags = tuple(t.strip() for t in str(value).split(",") if t.strip())
            found += [_unknown(name, t, RECOMPUTE_TAGS) for t in tags if t not in RECOMPUTE_TAGS]
            out[name] = 0 if tags else -1
        elif name in _CHOICES:
            if value in _CHOICES[name]:
                out[name] = _CHOICES[name].index(str(value))
            else:
                found.append(_unknown(name, str(value), _CHOICES[name]))
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
    return out, tags


def _unknown(name: str, value: str, choices: tuple[str, ...]) -> Violation:
    fix = did_you_mean(value, choices)
    return Violation(field=name, value=value, rule="not one of the choices", nearest_fix=fix)
