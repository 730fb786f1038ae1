"""Which links the transfers of a step take, and what else is on them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import chain
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
    stages = program.num_stages
    tables = (
        _Table(links, len(program.lanes), replicas, lambda k, r: links.lane(program.lanes[k], r)),
        _Table(links, stages, replicas, links.exchange),
        _Table(links, stages, replicas, links.reduce),
    )
    alike = fold and all(t.alike() for t in tables)
    count = 1 if alike else replicas
    names: dict[Hashable, int] = {}
    lanes, exchange, reduce = (
        tuple(t.paths(r, names, together=alike) for r in range(count)) for t in tables
    )
    return Routes(count, tuple(links.capacity(k) for k in names), lanes, exchange, reduce)


class _Table:
    """Routes of one kind by key (lane or stage) and replica, and what they weigh together."""

    def __init__(
        self, links: Links, keys: int, replicas: int, route: Callable[[int, int], Route]
    ) -> None:
        self._links = links
        self._routes = [[route(key, r) for r in range(replicas)] for key in range(keys)]
        self._weights: list[dict[Hashable, float]] = []
        for routes in self._routes:
            weights: dict[Hashable, float] = {}
            for link in chain.from_iterable(routes):
                weights[link] = weights.get(link, 0.0) + links.weight(link)
            self._weights.append(weights)

    def alike(self) -> bool:
        """Returns whether all replicas have as much on as wide links at the same time."""
        for routes, weights in zip(self._routes, self._weights, strict=True):
            load = {k: (self._links.capacity(k), w) for k, w in weights.items()}
            first = [load[k] for k in routes[0]]
            if any([load[k] for k in route] != first for route in routes):
                return False
        return True

    def paths(
        self, replica: int, names: dict[Hashable, int], *, together: bool
    ) -> tuple[Path, ...]:
        """Returns one replica's routes in numbers; `names` grows by the links on them."""
        out = []
        for routes, weights in zip(self._routes, self._weights, strict=True):
            path = []
            for link in routes[replica]:
                weight = weights[link] if together else self._links.weight(link)
                path.append((names.setdefault(link, len(names)), weight))
            out.append(tuple(path))
        return tuple(out)
