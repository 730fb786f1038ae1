"""A plan on a cluster: which of its links each transfer takes."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.collectives.topology import nic_of, shared_links
from flopwright.simulator.engine.links import Route
from flopwright.simulator.training.program import Lane
from flopwright.spec.cluster import ClusterSpec


@dataclass(slots=True)
class ClusterLinks:
    """Links of a cluster, one way each: ports of GPUs, adapters, ways up to the spine.

    A send loads its way out of one GPU and into another. A collective is a ring (between
    the nodes, if it leaves them): a rank's part is what it sends to the next one. Copies to
    the host have their own engine in each GPU and meet nothing else. What a calibration
    counts as hidden, and tensor-parallel traffic inside an action, loads no link here.
    """

    cluster: ClusterSpec
    plan: ParallelPlan
    _capacity: dict[Hashable, float] = field(default_factory=dict)
    _edges: dict[tuple[int, int], Route] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """GPUs of one rank of the engine: its tensor- and context-parallel group."""
        return self.plan.cp * self.plan.tp

    def capacity(self, link: Hashable) -> float:
        """Returns how many transfers the link carries at the speed of one alone."""
        return self._capacity[link]

    def weight(self, link: Hashable) -> float:
        """Returns how many GPUs of a rank are on a link that one of them is on."""
        name = str(link)
        if name.startswith("uplink"):
            return float(self.gpus)
        if not name.startswith("nic"):
            return 1.0
        node = self.cluster.node
        return float(min(self.gpus, max(1, node.gpus // min(node.nics or node.gpus, node.gpus))))

    def lane(self, lane: Lane, replica: int) -> Route:
        """Returns the route of a send; copies and gathers have theirs to themselves."""
        if lane.kind == "dp":
            return self.reduce(lane.stage, replica)
        if lane.kind != "send":
            return ()
        return self._edge(self._first(lane.stage, replica), self._first(lane.peer, replica))

    def exchange(self, stage: int, replica: int) -> Route:
        """Returns the route to the next rank of the expert group."""
        size = self.plan.ep
        first = self._first(stage, replica)
        base = first - first % size
        return self._next(tuple(range(base, base + size)), first) if size > 1 else ()

    def reduce(self, stage: int, replica: int) -> Route:
        """Returns the route to the same rank of the next replica."""
        group = tuple(self._first(stage, r) for r in range(self.plan.dp))
        return self._next(group, self._first(stage, replica)) if len(group) > 1 else ()

    def _first(self, stage: int, replica: int) -> int:
        return (stage * self.plan.dp + replica) * self.gpus

    def _next(self, group: tuple[int, ...], rank: int) -> Route:
        """Returns the way to the next in the group: in the next node, if the group has several."""
        domain = self.cluster.node.domain_gpus
        here = [r for r in group if r // domain == rank // domain]
        apart = len(here) < len(group)
        step = len(here) if apart else 1
        return self._edge(rank, group[(group.index(rank) + step) % len(group)])

    def _edge(self, source: int, target: int) -> Route:
        if (source, target) not in self._edges:
            self._edges[source, target] = self._route(source, target)
        return self._edges[source, target]

    def _route(self, source: int, target: int) -> Route:
        if source == target:
            return ()
        cluster = self.cluster
        over = cluster.fabric.oversubscription if cluster.fabric else 1.0
        network = cluster.network.bytes_per_s if cluster.network else 0.0
        alone = {"nic": network, "uplink": network / over}
        out = {f"port:{source}", f"nic:{nic_of(cluster, source)}"}
        route = []
        for link in shared_links(cluster, (source, target)):
            kind = link.name.split(":")[0]
            leaves = link.name in out or (kind == "uplink" and link.name == self._uplink(source))
            name = f"{link.name} {'out' if leaves else 'in'}"
            if kind == "link":
                name = f"link:{source}->{target}"
            speed = alone.get(kind, cluster.node.link.bytes_per_s)
            self._capacity[name] = link.bytes_per_s / speed if kind != "link" else 1.0
            route.append(name)
        return tuple(route)

    def _uplink(self, rank: int) -> str:
        fabric = self.cluster.fabric
        nodes = (fabric.nodes_per_leaf if fabric else None) or self.cluster.num_nodes
        return f"uplink:{rank // (nodes * self.cluster.node.gpus)}"


def replicas_in_exchange(plan: ParallelPlan) -> int:
    """Returns how many data-parallel replicas share an expert group (plan/mesh.py's order)."""
    gpus = plan.cp * plan.tp
    return math.lcm(plan.ep * plan.etp, gpus) // gpus
