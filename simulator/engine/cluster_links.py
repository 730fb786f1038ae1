"""A plan on a cluster: which of its links each transfer takes."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.collectives.topology import adapters, nic_of, shared_links
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
    _weight: dict[Hashable, float] = field(default_factory=dict)

    # Asked for every rank, and so looked up once: the GPUs of one rank of the engine (its
    # tensor- and context-parallel group), the replicas, the GPUs of an NVLink domain.
    gpus: int = field(init=False)
    _dp: int = field(init=False)
    _domain: int = field(init=False)

    def __post_init__(self) -> None:
        self.gpus, self._dp = self.plan.cp * self.plan.tp, self.plan.dp
        self._domain = self.cluster.node.domain_gpus

    def capacity(self, link: Hashable) -> float:
        """Returns how many transfers the link carries at the speed of one alone."""
        return self._capacity[link]

    def weight(self, link: Hashable) -> float:
        """Returns how many GPUs of a rank are on a link that one of them is on."""
        if link not in self._weight:
            self._weight[link] = self._gpus_on(str(link))
        return self._weight[link]

    def _gpus_on(self, name: str) -> float:
        if name.startswith("uplink"):
            return float(self.gpus)
        if not name.startswith("nic"):
            return 1.0
        each = self.cluster.node.gpus // adapters(self.cluster)
        return float(min(self.gpus, max(1, each)))

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
        return self._next(first - first % size, 1, size, first) if size > 1 else ()

    def reduce(self, stage: int, replica: int) -> Route:
        """Returns the route to the same rank of the next replica."""
        dp, rank = self._dp, self._first(stage, replica)
        return self._next(self._first(stage, 0), self.gpus, dp, rank) if dp > 1 else ()

    def _first(self, stage: int, replica: int) -> int:
        return (stage * self._dp + replica) * self.gpus

    def _next(self, base: int, stride: int, count: int, rank: int) -> Route:
        """Returns the way to the next in a group: in the next node, if the group has several.

        Its members are base, base + stride, ... (`count` of them), `rank` among them.
        """
        domain = self._domain
        node = rank // domain * domain
        below = max(0, -(-(node - base) // stride))  # members in nodes before this one
        here = min(count, -(-(node + domain - base) // stride)) - below
        step = here if here < count else 1
        return self._edge(rank, base + ((rank - base) // stride + step) % count * stride)

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
