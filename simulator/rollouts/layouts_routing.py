"""Which instance generates which response: the static policies of published systems.

All take known tokens ("oracle") where they use lengths at all; `capture` says how many of the
longest groups were known in advance.
"""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np
import numpy.typing as npt

from flopwright.spec.rollouts.layout import Fleet, Routing

Ints = npt.NDArray[np.int64]
# Policies in which responses wait in one queue for any instance.
POOLED: Final[frozenset[Routing]] = frozenset({"pooled", "pooled_longest_first"})
DYNAMIC: Final[frozenset[Routing]] = POOLED | {"least_loaded"}


def static_route(fleet: Fleet, lengths: Ints) -> list[list[int]]:
    """Returns the responses of each instance, in the order in which they are submitted.

    Args:
        lengths: tokens, [prompts, samples]; response ids count through it row by row.
    """
    prompts, samples = lengths.shape
    ids = np.arange(prompts * samples).reshape(prompts, samples)
    flat = lengths.ravel()
    match fleet.routing:
        case "group_equal_tokens":
            where = equal_loads(lengths.sum(axis=1), fleet.instances)
            return _collect([ids[g] for g in range(prompts)], where, fleet.instances)
        case "request_equal_tokens":
            where = equal_loads(flat, fleet.instances)
            return _collect([ids.ravel()[i : i + 1] for i in range(len(flat))], where,
                            fleet.instances)  # fmt: skip
        case "dedicated_long":
            return _dedicated(fleet, flat, ids)
        case _:
            where = np.arange(prompts) % fleet.instances
            return _collect([ids[g] for g in range(prompts)], where, fleet.instances)


def equal_loads(loads: Ints, instances: int) -> Ints:
    """Returns the instance of each item: the largest first, each to the least loaded one."""
    heap = [(0, i) for i in range(instances)]
    where = np.zeros(len(loads), np.int64)
    for item in np.argsort(-loads, kind="stable").tolist():
        load, index = heapq.heappop(heap)
        where[item] = index
        heapq.heappush(heap, (load + int(loads[item]), index))
    return where


def _collect(parts: list[Ints], where: Ints, instances: int) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in range(instances)]
    for part, index in zip(parts, where.tolist(), strict=True):
        out[index].extend(part.tolist())
    return out


def _dedicated(fleet: Fleet, flat: Ints, ids: Ints) -> list[list[int]]:
    """The longest share of the responses to some instances, groups of the rest in turns."""
    count = max(1, round(fleet.long_share * len(flat)))
    long = np.argsort(-flat, kind="stable")[:count]
    if fleet.instances == 1:
        return [ids.ravel().tolist()]
    share = float(flat[long].sum()) / float(flat.sum())
    few = fleet.long_instances or max(1, round(share * fleet.instances))
    few = min(few, fleet.instances - 1)
    is_long = np.zeros(len(flat), bool)
    is_long[long] = True
    out: list[list[int]] = [[] for _ in range(fleet.instances)]
    for index, members in enumerate(_split(long, flat, few)):
        out[index].extend(members)
    for group, row in enumerate(ids):
        index = few + group % (fleet.instances - few)
        out[index].extend(i for i in row.tolist() if not is_long[i])
    return out


def _split(items: Ints, flat: Ints, instances: int) -> list[list[int]]:
    where = equal_loads(flat[items], instances)
    return [items[where == i].tolist() for i in range(instances)]


def isolated_choices(fleet: Fleet, lengths: Ints, seed: int) -> list[list[list[int]]]:
    """Returns the routes that a system which adapts both counts would try.

    The groups with the longest responses, as far as they were foreseen, go to instances of
    their own, all others in turns to the rest: with 1, 2, 4 ... instances up to half of them,
    and 1, 2, 3, 4, 6, 8 ... groups. Which is best is seen by generating.
    """
    order = np.argsort(-lengths.max(axis=1), kind="stable")
    rng = np.random.default_rng([seed, 0x697367])
    known = order[rng.random(len(order)) < fleet.capture]
    most = max(1, len(lengths) // 3)
    counts = sorted({q for k in range(8) for q in (2**k, 3 * 2**k) if q <= min(most, len(known))})
    servers = [2**k for k in range(8) if 2**k <= fleet.instances // 2]
    return [_isolated(fleet.instances, few, known[:q], lengths) for few in servers for q in counts]


def _isolated(instances: int, few: int, chosen: Ints, lengths: Ints) -> list[list[int]]:
    total = lengths.sum(axis=1)
    ids = np.arange(lengths.size).reshape(lengths.shape)
    out: list[list[int]] = [[] for _ in range(instances)]
    for group, index in zip(
        chosen.tolist(), equal_loads(total[chosen], few).tolist(), strict=True
    ):
        out[index].extend(ids[group].tolist())
    rest = np.setdiff1d(np.arange(len(lengths)), chosen)
    for place, group in enumerate(rest.tolist()):
        out[few + place % (instances - few)].extend(ids[group].tolist())
    return out
