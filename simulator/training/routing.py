"""What uneven routing costs: the busiest rank of an expert group sets the pace.

Loads are shares of a step's rows by expert. Experts of an uneven load stand on the ranks in
an order that has nothing to do with their load; copies of the busiest ones ("redundant
experts") are placed for balance. Planned anew for every micro-batch, copies balance any load
exactly: a rank takes rows from at most one other (MoonEP, arXiv 2607.24653), so as many
copies as the model has experts always suffice.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from flopwright.ops import Array
from flopwright.spec.model import Moe
from flopwright.spec.workload import ExpertLoad

_PLACEMENTS = 64  # random orders of the experts that the mean is taken over
_SEED = 0


def busiest_over_mean(moe: Moe | None, load: ExpertLoad, ep: Array) -> Array:
    """Returns rows of the busiest rank over the mean of its expert group, one an entry of `ep`.

    1 where experts are chosen evenly; the capacity factor where every expert takes that much.
    """
    if moe is None or load.kind == "balanced":
        return np.ones(len(ep))
    if load.kind == "capacity":
        return np.full(len(ep), load.capacity_factor)
    shares = power_law(moe.num_experts, load.exponent)
    sizes, index = np.unique(ep, return_inverse=True)
    found = [_tail(shares, int(size), load.redundant_experts) for size in sizes]
    return np.asarray(np.array(found)[index.reshape(-1)])


def power_law(experts: int, exponent: float) -> Array:
    """Returns shares of the load proportional to i^-exponent for i = 1..experts; they sum to 1."""
    weights = np.arange(1, experts + 1, dtype=float) ** -exponent
    return np.asarray(weights / weights.sum())


def _tail(shares: Array, ranks: int, copies: int) -> float:
    if ranks == 1 or copies >= len(shares):
        return 1.0
    if copies:
        return float(_placed(split_hottest(shares, copies), ranks).max() * ranks)
    rng = np.random.default_rng(_SEED)
    order = rng.permuted(np.tile(shares, (_PLACEMENTS, 1)), axis=1)
    by_rank = order.reshape(_PLACEMENTS, ranks, -1).sum(axis=2)
    return float(by_rank.max(axis=1).mean() * ranks)


def split_hottest(shares: Array, copies: int) -> Array:
    """Returns the load of every slot once the busiest experts have `copies` copies in all.

    Each copy goes to the expert whose slots are the fullest; its load is split evenly.
    """
    heap = [(-s, s, 1) for s in shares.tolist()]
    heapq.heapify(heap)
    for _ in range(copies):
        _, share, slots = heapq.heappop(heap)
        heapq.heappush(heap, (-share / (slots + 1), share, slots + 1))
    return np.array([share / slots for _, share, slots in heap for _ in range(slots)])


def _placed(slots: Array, ranks: int) -> Array:
    """Returns the load of each rank: the fullest slot next goes to the emptiest rank with room."""
    room = math.ceil(len(slots) / ranks)
    heap = [(0.0, 0, rank) for rank in range(ranks)]
    full = np.zeros(ranks)
    for slot in np.sort(slots)[::-1].tolist():
        load, held, rank = heapq.heappop(heap)
        full[rank] = load + slot
        if held + 1 < room:
            heapq.heappush(heap, (load + slot, held + 1, rank))
    return full


def balancing_moves(loads: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Returns moves (from, to, rows) after which every rank has the mean load.

    Each rank receives from at most one other: the emptiest is filled from the fullest, as in
    Walker's alias method, and is done. The loads' sum must be a multiple of their number.
    """
    mean, rest = divmod(sum(loads), len(loads))
    assert rest == 0, "rows do not divide over the ranks"
    left = list(loads)
    low = [r for r, load in enumerate(left) if load < mean]
    high = [r for r, load in enumerate(left) if load > mean]
    moves = []
    while low:
        target, source = low.pop(), high[-1]
        rows = mean - left[target]
        moves.append((source, target, rows))
        left[source] -= rows
        if left[source] <= mean:
            high.pop()
        if left[source] < mean:
            low.append(source)
    return tuple(moves)


def redundant_slots(num_experts: int, ranks: int) -> tuple[int, int]:
    """Returns (slots a rank may need in the worst case, slots that always suffice).

    ceil(E (R - 1) / R^2) and ceil(E / R) for E experts on R ranks (arXiv 2607.24653).
    """
    return -(-num_experts * (ranks - 1) // ranks**2), -(-num_experts // ranks)
