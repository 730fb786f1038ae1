"""What a cluster's links look like: a graph of GPUs, switches, adapters, hosts and storage.

Nodes of the graph are ("gpu", i), ("switch", d) of NVLink domain d, ("nic", i), ("leaf", l),
("spine", 0), ("host", k), ("host_memory", k), ("nvme", k) and ("storage", 0). Every edge is
directed and carries `capacity` in bytes/s and `latency_s`; a missing capacity is unlimited.
The figures that formulas use are cuts and paths of this graph (`levels.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike

from flopwright.errors import InputError, Violation
from flopwright.ops import Array
from flopwright.spec.cluster import ClusterSpec

Place = tuple[str, int]
Graph = Any  # networkx.DiGraph of Places

# A quotient such as 7 / (7 / 3) may come out a last digit above its whole number.
_ROUNDING: Final = 1e-9
# More vertices than this are a mistake, not a drawing: levels need a few nodes only.
MAX_GPUS_IN_GRAPH: Final = 100_000


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A group's layout; arrays broadcast over candidates. A node here is an NVLink domain.

    Attributes:
        size: ranks of the group.
        local: ranks of the group on one node; size / local is the number of nodes. Where a
            node holds fewer than another, this is the mean.
        stride: ranks from one member to the next; None of neighbours.
    """

    size: Array
    local: Array
    stride: Array | None = None

    @property
    def nodes(self) -> Array:
        """Nodes the group spans."""
        return np.asarray(np.ceil(self.size / self.local - _ROUNDING))

    @property
    def spans(self) -> Array:
        """Whether the group leaves its node."""
        return np.asarray(self.local < self.size)

    @property
    def apart(self) -> Array:
        """Ranks from one member to the next."""
        return np.ones_like(self.size) if self.stride is None else self.stride


def group_shape(size: ArrayLike, stride: ArrayLike, gpus_per_node: int) -> GroupShape:
    """Returns the layout of a group of `size` ranks that stand `stride` apart.

    Ranks are laid out tp fastest (plan/mesh.py), node after node, so a group of stride s
    has up to floor(gpus_per_node / s) members on a node, at least one and at most all. It
    takes as few nodes as that allows, evenly filled: a job of 128 GPUs on NVL72 racks is
    given 64 of each, not 72 and 56.

    Args:
        gpus_per_node: GPUs of one NVLink domain (NodeSpec.domain_gpus).
    """
    total, apart = np.asarray(size, float), np.asarray(stride, float)
    most = np.clip(np.floor(gpus_per_node / apart), 1.0, total)
    local = np.asarray(total / np.ceil(total / most))
    return GroupShape(size=total, local=local, stride=apart)


def topology(cluster: ClusterSpec) -> Graph:
    """Returns the graph of a cluster's links; rank r computes on ("gpu", r).

    Raises:
        InputError: more GPUs than a graph is drawn of.
    """
    if cluster.num_gpus > MAX_GPUS_IN_GRAPH:
        raise InputError(
            Violation(
                field="cluster.num_nodes",
                value=f"{cluster.num_gpus:,} GPUs",
                rule="too many to draw a graph of their links",
                limit=f"{MAX_GPUS_IN_GRAPH:,}",
            )
        )
    graph: Graph = nx.DiGraph()
    for rank in range(cluster.num_gpus):
        _add_gpu(graph, cluster, rank)
    for node in range(cluster.num_nodes):
        _add_host(graph, cluster, node)
    if cluster.network is not None:
        _add_fabric(graph, cluster)
    return graph


def _join(graph: Graph, a: Place, b: Place, capacity: float | None, latency_s: float) -> None:
    limit = {} if capacity is None else {"capacity": capacity}
    graph.add_edge(a, b, latency_s=latency_s, **limit)
    graph.add_edge(b, a, latency_s=latency_s, **limit)


def _add_gpu(graph: Graph, cluster: ClusterSpec, rank: int) -> None:
    node, gpu = cluster.node, ("gpu", rank)
    graph.add_node(gpu)
    if node.link_layout == "mesh":
        first = rank // node.gpus * node.gpus
        for other in range(first, rank):
            each = node.link.bytes_per_s / (node.gpus - 1)
            _join(graph, gpu, ("gpu", other), each, node.link.latency_s)
    else:
        switch = ("switch", rank // node.domain_gpus)
        _join(graph, gpu, switch, node.link.bytes_per_s, node.link.latency_s / 2)
    if node.host_link is not None:
        host = ("host", rank // node.gpus)
        _join(graph, gpu, host, node.host_link.bytes_per_s, node.host_link.latency_s)


def _add_host(graph: Graph, cluster: ClusterSpec, index: int) -> None:
    node, host = cluster.node, ("host", index)
    _join(graph, host, ("host_memory", index), node.host_memory_bytes_per_s, 0.0)
    for name, link, at in (
        ("nvme", node.nvme, index),
        ("storage", cluster.storage, 0),
    ):
        if link is not None:
            _join(graph, host, (name, at), link.bytes_per_s * node.gpus, link.latency_s)


def adapters(cluster: ClusterSpec) -> int:
    """Returns adapters a node that take part as one: never more than one a GPU."""
    return min(cluster.node.nics or cluster.node.gpus, cluster.node.gpus)


def leaf_nodes(cluster: ClusterSpec) -> int:
    """Returns nodes under one leaf; all of them where the fabric has no leaves."""
    per_leaf = cluster.fabric.nodes_per_leaf if cluster.fabric else None
    return per_leaf or cluster.num_nodes


def nic_of(cluster: ClusterSpec, rank: int) -> int:
    """Returns the adapter that a rank's traffic leaves by."""
    nics, gpus = adapters(cluster), cluster.node.gpus
    return rank // gpus * nics + rank % gpus * nics // gpus


def _add_fabric(graph: Graph, cluster: ClusterSpec) -> None:
    network, gpus, fabric = cluster.network, cluster.node.gpus, cluster.fabric
    assert network is not None
    nics, per_leaf = adapters(cluster), leaf_nodes(cluster)
    for rank in range(cluster.num_gpus):
        _join(graph, ("gpu", rank), ("nic", nic_of(cluster, rank)), None, 0.0)
    for nic in range(nics * cluster.num_nodes):
        leaf = ("leaf", nic // nics // per_leaf)
        _join(graph, ("nic", nic), leaf, network.bytes_per_s * gpus / nics, network.latency_s / 2)
    up = per_leaf * gpus * network.bytes_per_s / (fabric.oversubscription if fabric else 1.0)
    for leaf_index in range(-(-cluster.num_nodes // per_leaf)):
        spine_s = fabric.spine_latency_s / 2 if fabric else 0.0
        _join(graph, ("leaf", leaf_index), ("spine", 0), up, spine_s)


@dataclass(frozen=True, slots=True)
class SharedLink:
    """A link that groups may contend for: its name, and what it carries each way."""

    name: str
    bytes_per_s: float


def shared_links(cluster: ClusterSpec, ranks: tuple[int, ...]) -> tuple[SharedLink, ...]:
    """Returns the links that a ring over these ranks uses, in the order of their names.

    A GPU's port to its switch, an adapter, a leaf's way up: two groups that name the same
    link share its bandwidth. The paths are those of `topology`, and cheap to ask for again.

    Raises:
        InputError: a rank that the cluster does not have.
    """
    wrong = [r for r in ranks if not 0 <= r < cluster.num_gpus]
    if wrong:
        raise InputError(
            Violation(
                field="ranks",
                value=str(wrong[0]),
                rule="no such rank in the cluster",
                limit=f"0 to {cluster.num_gpus - 1}",
            )
        )
    node, network = cluster.node, cluster.network
    mesh = node.gpus if node.link_layout == "mesh" else 0
    over = cluster.fabric.oversubscription if cluster.fabric else 1.0
    return _ring_links(
        tuple(ranks),
        _Wiring(
            gpus=node.gpus,
            domain=node.gpus if mesh else node.domain_gpus,
            mesh=mesh,
            nics=adapters(cluster),
            leaf=leaf_nodes(cluster) * node.gpus,
            link=node.link.bytes_per_s,
            network=network.bytes_per_s if network else 0.0,
            oversubscription=over,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Wiring:
    """What the ring's links depend on, as a key of the cache."""

    gpus: int
    domain: int
    mesh: int
    nics: int
    leaf: int
    link: float
    network: float
    oversubscription: float


@lru_cache(maxsize=4096)
def _ring_links(ranks: tuple[int, ...], on: _Wiring) -> tuple[SharedLink, ...]:
    found: dict[str, float] = {}
    for here, there in zip(ranks, ranks[1:] + ranks[:1], strict=True):
        if here == there:
            continue
        if here // on.domain == there // on.domain:
            if on.mesh:
                low, high = sorted((here, there))
                found[f"link:{low}-{high}"] = on.link / (on.mesh - 1)
            else:
                found |= {f"port:{r}": on.link for r in (here, there)}
            continue
        for rank in (here, there):
            nic = rank // on.gpus * on.nics + rank % on.gpus * on.nics // on.gpus
            found[f"nic:{nic}"] = on.network * on.gpus / on.nics
            if here // on.leaf != there // on.leaf:
                up = on.leaf * on.network / on.oversubscription
                found[f"uplink:{rank // on.leaf}"] = up
    return tuple(SharedLink(name, rate) for name, rate in sorted(found.items()))
