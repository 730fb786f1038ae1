"""What can be chosen of an RL loop: the axes of the search, and the grid that they span."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from flopwright.spec.loop import LayoutKind, LoopScenario, Place

DEFAULT_SHARES: Final = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
DEFAULT_FRACTIONS: Final = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
DEFAULT_BOUNDS: Final = (1, 2, 4, 8)
# Parts of an equal share of the attempts that an instance may be told to decode at once.
_SLOT_PARTS: Final = (8, 4, 2)
_POOL_PARTS: Final = (0.25, 0.5, 0.75)
OnUpdate = Literal["drop", "keep", "park"]
Pool = tuple[int, OnUpdate]
# Axes of which neighbours are tried, in order of size; of the others every value is.
ORDERED: Final = ("slots", "stop_fraction", "staleness_bound")


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
        elastic: the GPUs that train generate too while they wait (asynchronous loops).
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
    elastic: bool = False

    @property
    def instances(self) -> int:
        """Whole instances that the generating GPUs make."""
        return self.generation_gpus // self.gpus_per_instance

    @property
    def shape(self) -> Shape:
        """One instance."""
        return Shape(self.gpus_per_instance, self.tp, self.ep)


@dataclass(frozen=True, slots=True)
class Shape:
    """An instance: its GPUs and how they share the model."""

    gpus: int
    tp: int = 0
    ep: int = 0


@dataclass(frozen=True, slots=True)
class Axes:
    """The values of one loop's axes, given the instances that hold its model."""

    loop: LoopScenario
    shapes: tuple[Shape, ...]

    def structures(self) -> Iterator[Choice]:
        """Yields layouts with their GPUs and instances, the rest of each at its first value."""
        for layout, shape in itertools.product(self.layouts, self.shapes):
            for gpus in _generating(self.loop, layout, shape):
                bare = Choice(
                    layout=layout,
                    generation_gpus=gpus,
                    gpus_per_instance=shape.gpus,
                    tp=shape.tp,
                    ep=shape.ep,
                )
                first = {name: values[0] for name, values in self.policy(bare).items()}
                yield with_values(bare, first)

    @property
    def layouts(self) -> tuple[LayoutKind, ...]:
        """Returns the layouts to try: those asked for, else all that what is known can price.

        Phases on GPUs of their own need what an update takes on fewer GPUs: `train`.
        """
        if self.loop.search.layout:
            return self.loop.search.layout
        return ("colocated",) if self.loop.train is None else get_args(LayoutKind)

    def policy(self, choice: Choice) -> dict[str, tuple[Any, ...]]:
        """Returns every axis but the structure, with its values for a choice's structure.

        "pool" is two fields of a choice: the size, and what a weight update does.
        """
        loop, layout = self.loop, choice.layout
        return {
            "slots": _slots(loop, choice.instances),
            "stop_fraction": _fractions(loop, layout),
            "staleness_bound": _bounds(loop, layout),
            "pool": _pools(loop),
            "states": _states(loop, layout),
            "throttled": loop.search.throttle or _throttle(loop),
            "elastic": _elastic(loop, choice),
        }

    def size(self) -> int:
        """Returns how many choices there are in all, equal ones counted as often as they come."""
        return sum(
            math.prod(len(values) for values in self.policy(one).values())
            for one in self.structures()
        )

    def neighbours(self, choice: Choice) -> Iterator[Choice]:
        """Yields choices that differ in one axis: the next values of ordered ones, all others.

        Of another structure the nearest value of the same policy is taken.
        """
        for name, values in self.policy(choice).items():
            own = value_of(choice, name)
            near = [v for v in values if v != own]
            if name in ORDERED and own in values:
                place = values.index(own)
                near = list(values[max(0, place - 1) : place + 2])
            for value in near:
                if value != own:
                    yield with_values(choice, {name: value})
        for other in self.structures():
            if _one_step(choice, other):
                yield self.at(other, choice)

    def at(self, structure: Choice, like: Choice) -> Choice:
        """Returns a structure with the policy of another choice, as near as its axes have it."""
        values: dict[str, Any] = {}
        for name, options in self.policy(structure).items():
            own = value_of(like, name)
            if own in options:
                values[name] = own
            elif name in ORDERED and own is not None and None not in options:
                # Slots are per instance: the same share of the attempts in flight.
                aim = own * like.instances / structure.instances if name == "slots" else own
                values[name] = min(options, key=lambda option: abs(option - aim))
            else:
                values[name] = options[0]
        return with_values(structure, values)


def _one_step(a: Choice, b: Choice) -> bool:
    """Whether two structures differ in one of layout, share and instance."""
    differ = (a.layout != b.layout, a.generation_gpus != b.generation_gpus, a.shape != b.shape)
    if a.layout != b.layout and "colocated" in {a.layout, b.layout}:
        return a.shape == b.shape  # the share of a co-located loop is all
    return sum(differ) == 1


def value_of(choice: Choice, name: str) -> Any:
    """Returns a choice's value on an axis."""
    if name == "pool":
        return choice.host_pool_bytes, choice.on_update
    return getattr(choice, name)


def with_values(choice: Choice, values: dict[str, Any]) -> Choice:
    """Returns the choice with other values on some axes."""
    fields = dict(values)
    if "pool" in fields:
        fields["host_pool_bytes"], fields["on_update"] = fields.pop("pool")
    return replace(choice, **fields)


def choices(loop: LoopScenario, shapes: tuple[Shape, ...]) -> tuple[Choice, ...]:
    """Returns every point of the grid, each once.

    Args:
        shapes: of an instance, each of which holds the model.
    """
    return tuple(dict.fromkeys(_choices(Axes(loop, shapes))))


def _choices(axes: Axes) -> Iterator[Choice]:
    for structure in axes.structures():
        policy = axes.policy(structure)
        for values in itertools.product(*policy.values()):
            yield with_values(structure, dict(zip(policy, values, strict=True)))


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
    found = {*(max(1, share // part) for part in _SLOT_PARTS)} | ({own} if own else set())
    return (0, *sorted(found, reverse=True))


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


def _pools(loop: LoopScenario) -> tuple[Pool, ...]:
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
    found: list[Pool] = []
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


def _elastic(loop: LoopScenario, choice: Choice) -> tuple[bool, ...]:
    """Returns whether to lend: where what trains makes at least one instance."""
    training = loop.num_gpus - choice.generation_gpus
    if choice.layout != "async" or training < choice.gpus_per_instance:
        return (False,)
    return loop.search.elastic or (False, True)


def own_shape(loop: LoopScenario) -> Shape:
    """Returns the instance as the scenario states it."""
    return Shape(gpus=loop.rollout.gpus_per_instance)
