"""What can be chosen of an RL loop, and the grid of choices that a search starts from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from flopwright.spec.loop import LayoutKind, LoopScenario, Place

DEFAULT_SHARES: Final = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
DEFAULT_FRACTIONS: Final = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
DEFAULT_BOUNDS: Final = (1, 2, 4, 8)
# Parts of an equal share of the attempts that an instance may be told to decode at once.
_SLOT_PARTS: Final = (8, 4, 2)
_POOL_PARTS: Final = (0.25, 0.5, 0.75)
OnUpdate = Literal["drop", "keep", "park"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One point of the search.

    Attributes:
        tp, ep: of an instance; 0 where the engine is given in numbers.
        slots: attempts an instance decodes at once; 0: what its cache holds.
        staleness_bound: versions, of an asynchronous loop; None elsewhere.
        host_pool_bytes: host memory of a node for caches.
        on_update: what becomes of caches when the weights change.
        states: where training states lie while the GPUs generate.
    """

    layout: LayoutKind
    generation_gpus: int
    gpus_per_instance: int
    tp: int = 0
    ep: int = 0
    slots: int = 0
    stop_fraction: float = 1.0
    staleness_bound: int | None = None
    host_pool_bytes: int = 0
    on_update: OnUpdate = "drop"
    states: Place = "hbm"
    throttled: bool = False

    @property
    def instances(self) -> int:
        """Whole instances that the generating GPUs make."""
        return self.generation_gpus // self.gpus_per_instance


@dataclass(frozen=True, slots=True)
class Shape:
    """An instance: its GPUs and how they share the model."""

    gpus: int
    tp: int = 0
    ep: int = 0


def choices(loop: LoopScenario, shapes: tuple[Shape, ...]) -> tuple[Choice, ...]:
    """Returns every point of the grid, each once.

    Args:
        shapes: of an instance, each of which holds the model.
    """
    return tuple(dict.fromkeys(_choices(loop, shapes)))


def _choices(loop: LoopScenario, shapes: tuple[Shape, ...]) -> Iterator[Choice]:
    layouts = loop.search.layout or ("colocated",)
    for layout, shape in itertools.product(layouts, shapes):
        for gpus in _generating(loop, layout, shape):
            axes = itertools.product(
                _slots(loop, gpus // shape.gpus),
                _fractions(loop, layout),
                _bounds(loop, layout),
                _pools(loop),
                _states(loop, layout),
                loop.search.throttle or _throttle(loop),
            )
            for slots, fraction, bound, (pool, on_update), states, throttled in axes:
                yield Choice(
                    layout=layout,
                    generation_gpus=gpus,
                    gpus_per_instance=shape.gpus,
                    tp=shape.tp,
                    ep=shape.ep,
                    slots=slots,
                    stop_fraction=fraction,
                    staleness_bound=bound,
                    host_pool_bytes=pool,
                    on_update=on_update,
                    states=states,
                    throttled=throttled,
                )


def _generating(loop: LoopScenario, layout: LayoutKind, shape: Shape) -> tuple[int, ...]:
    """Returns numbers of GPUs that make whole instances, and whole nodes where there are any."""
    total, attempts = loop.num_gpus, loop.rollout.num_attempts
    if layout == "colocated":
        whole = total // shape.gpus * shape.gpus
        return (whole,) if whole and whole == total and whole // shape.gpus <= attempts else ()
    unit = shape.gpus
    if loop.cluster is not None and total > loop.cluster.node.gpus:
        unit = math.lcm(unit, loop.cluster.node.gpus)
    shares = loop.search.generation_share or DEFAULT_SHARES
    found = {round(share * total / unit) * unit for share in shares}
    return tuple(sorted(g for g in found if 0 < g < total and g // shape.gpus <= attempts))


def _slots(loop: LoopScenario, instances: int) -> tuple[int, ...]:
    """Returns slots an instance; a limit only helps where the cache can run short."""
    if loop.search.slots:
        return loop.search.slots
    own = loop.rollout.slots_per_instance
    if not can_run_short(loop):
        return (own or 0,)
    share = -(-loop.rollout.num_attempts // instances)
    found = {0, *(max(1, share // part) for part in _SLOT_PARTS)}
    return tuple(sorted(found | ({own} if own else set())))


def can_run_short(loop: LoopScenario) -> bool:
    """Returns whether the cache of an instance has an end."""
    return loop.serve is not None or loop.rollout.kv_capacity_tokens is not None


def _fractions(loop: LoopScenario, layout: LayoutKind) -> tuple[float, ...]:
    rollout = loop.rollout
    if layout == "async" or rollout.stop.rule != "lambda":
        return (1.0 if layout == "async" else rollout.stop_fraction,)
    if loop.search.stop_fraction:
        return loop.search.stop_fraction
    found = {*DEFAULT_FRACTIONS, rollout.stop_fraction}
    bound = rollout.goals.max_mean_staleness
    if bound is not None:  # the least lambda that the goal allows
        found.add(min(1.0, math.ceil(1000 / (1 + bound)) / 1000))
    return tuple(sorted(found))


def _bounds(loop: LoopScenario, layout: LayoutKind) -> tuple[int | None, ...]:
    if layout != "async":
        return (None,)
    return loop.search.staleness_bound or DEFAULT_BOUNDS


def _pools(loop: LoopScenario) -> tuple[tuple[int, OnUpdate], ...]:
    """Returns sizes of the pool in a node's memory, each with what a weight update does.

    Caches can only be parked where there is a pool; without one they are dropped, or kept as
    the scenario says. With one both are tried: prefilling again may be cheaper than loading.
    """
    cluster, own = loop.cluster, loop.rollout.kv.on_update
    if cluster is None or cluster.node.host_link is None:
        return ((0, own),)
    free = cluster.node.host_bytes - loop.hosts.reserved_bytes
    sizes = loop.search.host_pool or (0, *(int(free * part) for part in _POOL_PARTS if free > 0))
    without: OnUpdate = "drop" if own == "park" else own
    found: list[tuple[int, OnUpdate]] = []
    for size in sizes:
        found += [(size, "drop"), (size, "park")] if size else [(0, without)]
    return tuple(found)


def _states(loop: LoopScenario, layout: LayoutKind) -> tuple[Place, ...]:
    """Returns places of the training states: they move only where GPUs change their use."""
    if layout != "colocated" or loop.train is None or loop.cluster is None:
        return ("hbm",)
    if loop.search.states:
        return loop.search.states
    return ("hbm", "dram", "nvme") if loop.hosts.nvme_bytes else ("hbm", "dram")


def _throttle(loop: LoopScenario) -> tuple[bool, ...]:
    return (False, True) if can_run_short(loop) else (False,)


def own_shape(loop: LoopScenario) -> Shape:
    """Returns the instance as the scenario states it."""
    return Shape(gpus=loop.rollout.gpus_per_instance)
