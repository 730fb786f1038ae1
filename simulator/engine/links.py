"""Which links the transfers of a step take, and what else is on them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from flopwright.simulator.engine.network import Path
from flopwright.simulator.training.program import Lane, Program

Route = tuple[Hashable, ...]


class Links(Protocol):
    """Routes over named links. What has no route (an empty one) has its links for itself.

    A rank is a stage of a replica and stands for a whole tensor-parallel group, each GPU of
    which sends its own part: `weight` is how many transfers that is on links they share.
    """

    def capacity(self, link: Hashable) -> float:
        """Returns how many transfers the link carries at their full speed."""
        ...

    def weight(self, link: Hashable) -> float:
        """Returns how many transfers one of a rank's is on this link."""
        ...

    def lane(self, lane: Lane, replica: int) -> Route:
        """Returns the route of what a lane does: a send, or a copy."""
        ...

    def exchange(self, stage: int, replica: int) -> Route:
        """Returns the route of a rank's part in an expert exchange."""
        ...

    def reduce(self, stage: int, replica: int) -> Route:
        """Returns the route of a rank's part in the reduction of gradients."""
        ...


@dataclass(frozen=True, slots=True)
class Routes:
    """Routes in numbers, by replica and then by lane or stage.

    Attributes:
        replicas: that have to be simulated one by one.
    """

    replicas: int
    capacities: tuple[float, ...]
    lanes: tuple[tuple[Path, ...], ...]
    exchange: tuple[tuple[Path, ...], ...]
    reduce: tuple[tuple[Path, ...], ...]


def routes_of(program: Program, links: Links, replicas: int, *, fold: bool) -> Routes:
    """Returns the routes of every rank.

    Args:
        fold: simulate one replica for all where they all have the same on their links at the
            same time; it then stands for all of them on the links that they share.
    """
    stages = range(program.num_stages)
    asked: tuple[tuple[int, Callable[[int, int], Route]], ...] = (
        (len(program.lanes), lambda lane, replica: links.lane(program.lanes[lane], replica)),
        (len(stages), links.exchange),
        (len(stages), links.reduce),
    )
    routes = [
        [[route(k, replica) for k in range(count)] for replica in range(replicas)]
        for count, route in asked
    ]
    names: dict[Hashable, int] = {}
    weights: dict[tuple[int, int, Hashable], float] = {}
    for kind, by_replica in enumerate(routes):
        for by_key in by_replica:
            for key, route in enumerate(by_key):
                for link in route:
                    names.setdefault(link, len(names))
                    place = (kind, key, link)
                    weights[place] = weights.get(place, 0.0) + links.weight(link)
    capacities = tuple(links.capacity(link) for link in names)

    def paths(kind: int, replica: int, together: bool) -> tuple[Path, ...]:
        return tuple(
            tuple(
                (names[k], weights[kind, key, k] if together else links.weight(k)) for k in route
            )
            for key, route in enumerate(routes[kind][replica])
        )

    def loads(replica: int) -> list[list[list[tuple[float, float]]]]:
        return [
            [[(capacities[k], w) for k, w in path] for path in paths(kind, replica, True)]
            for kind in range(len(asked))
        ]

    first = loads(0)
    alike = fold and all(loads(r) == first for r in range(1, replicas))
    count = 1 if alike else replicas
    lanes, exchange, reduce = (
        tuple(paths(kind, r, alike) for r in range(count)) for kind in range(len(asked))
    )
    return Routes(count, capacities, lanes, exchange, reduce)
