"""Bandwidth and latency of each level of a cluster, as cuts and paths of its graph.

A cluster repeats itself, so the graph of a few nodes of it has the same cuts per GPU as the
whole: two NVLink domains under each of two leaves are enough, and are cut once a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import networkx as nx

from flopwright.simulator.collectives.topology import Graph, Place, leaf_nodes, topology
from flopwright.spec.cluster import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """What one GPU can send at each level, and how long a small message takes there.

    Attributes:
        near_bytes_per_s: towards the other GPUs of its NVLink domain.
        far_bytes_per_s: towards other domains while all GPUs of its domain send; 0 of none.
        spine_bytes_per_s: towards other leaves while all GPUs of its leaf send.
        host_bytes_per_s: between a GPU and its node's memory while all of its node copy; 0 of
            a node that does not say how its GPUs reach their host.
        nvme_bytes_per_s, storage_bytes_per_s: the same of the node's disks and of the cluster's
            storage; 0 where there is none.
        leaf_gpus: GPUs under one leaf.
        domain_gpus: GPUs of one NVLink domain.
        mesh_gpus: GPUs of a node whose links are a full mesh; 0 of a switch.
    """

    near_bytes_per_s: float
    near_latency_s: float
    far_bytes_per_s: float
    far_latency_s: float
    spine_bytes_per_s: float
    spine_latency_s: float
    host_bytes_per_s: float
    nvme_bytes_per_s: float
    storage_bytes_per_s: float
    leaf_gpus: int
    domain_gpus: int
    mesh_gpus: int


_known: dict[tuple[object, ...], Levels] = {}
_MAX_KNOWN: Final = 512
_INSIDE: Final = frozenset({"gpu", "switch"})
_TIERS: Final = ("host_memory", "nvme", "storage")
_BETWEEN: Final = frozenset({"gpu", "switch", "nic", "leaf", "spine"})


def levels(cluster: ClusterSpec) -> Levels:
    """Returns the levels of a cluster; those of an equal cluster are looked up."""
    node = cluster.node
    shape = (node.gpus, node.domain_gpus, node.link_layout, node.nics, leaf_nodes(cluster))
    tiers = (node.host_link, node.host_memory_bytes_per_s, node.nvme, cluster.storage)
    key = (shape, node.link, cluster.network, cluster.fabric, tiers)
    if key not in _known:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[key] = _cut_levels(cluster)
    return _known[key]


def _cut_levels(cluster: ClusterSpec) -> Levels:
    node, small = cluster.node, representative(cluster)
    graph, domain = topology(small), small.node.domain_gpus
    ranks: list[Place] = [("gpu", r) for r in range(small.num_gpus)]
    first, second = ranks[:domain], ranks[domain : 2 * domain]
    near, near_s = node.link.bytes_per_s, node.link.latency_s
    if domain > 1:
        inside = between(graph, _INSIDE)
        near = cut_bytes_per_s(inside, first[:1], first[1:])
        near_s = path_s(inside, first[0], first[1])
    host, nvme, storage = (_tier_bytes_per_s(graph, node.gpus, kind) for kind in _TIERS)
    far = spine = far_s = spine_s = 0.0
    if cluster.network is not None:
        graph = between(graph, _BETWEEN)
        far = spine = cut_bytes_per_s(graph, first, second)
        far_s = spine_s = path_s(graph, first[0], second[0])
        if cluster.fabric is not None:
            leaf = leaf_nodes(small) * small.node.gpus
            spine = cut_bytes_per_s(graph, ranks[:leaf], ranks[leaf : 2 * leaf])
            spine_s = path_s(graph, ranks[0], ranks[leaf])
    return Levels(
        near_bytes_per_s=near,
        near_latency_s=near_s,
        far_bytes_per_s=far,
        far_latency_s=far_s,
        spine_bytes_per_s=spine,
        spine_latency_s=spine_s,
        host_bytes_per_s=host,
        nvme_bytes_per_s=nvme,
        storage_bytes_per_s=storage,
        leaf_gpus=leaf_nodes(cluster) * node.gpus,
        domain_gpus=node.domain_gpus,
        mesh_gpus=node.gpus if node.link_layout == "mesh" and node.gpus > 1 else 0,
    )


def _tier_bytes_per_s(graph: Graph, gpus: int, kind: str) -> float:
    """Returns bytes/s of each GPU of the first node towards a tier behind its host."""
    tier = between(graph, frozenset({"gpu", "host", kind}))
    node: list[Place] = [("gpu", r) for r in range(gpus)]
    if (kind, 0) not in tier or ("host", 0) not in tier or not tier.has_edge(node[0], ("host", 0)):
        return 0.0
    return cut_bytes_per_s(tier, node, [(kind, 0)])


def representative(cluster: ClusterSpec) -> ClusterSpec:
    """Returns a few nodes of a cluster that have its cuts per GPU.

    A switch's domain is cut to two nodes and a leaf to two domains, each capacity in
    proportion; there are two leaves.
    """
    node = cluster.node
    domain = min(node.domain_gpus, 2 * node.gpus)
    per_leaf = 2 * domain // node.gpus
    fabric = cluster.fabric
    if fabric is not None:
        fabric = fabric.model_copy(update={"nodes_per_leaf": per_leaf})
    smaller = node.model_copy(update={"nvlink_domain_gpus": domain})
    return cluster.model_copy(
        update={"node": smaller, "fabric": fabric, "num_nodes": 2 * per_leaf}
    )


def between(graph: Graph, kinds: frozenset[str]) -> Graph:
    """Returns the part of a graph that holds places of these kinds only."""
    return graph.subgraph([place for place in graph if place[0] in kinds]).copy()


def cut_bytes_per_s(graph: Graph, senders: list[Place], receivers: list[Place]) -> float:
    """Returns bytes/s of each sender while all send to the receivers: a minimum cut."""
    flow = graph.copy()
    flow.add_edges_from(("source", s) for s in senders)
    flow.add_edges_from((r, "sink") for r in receivers)
    return float(nx.maximum_flow_value(flow, "source", "sink")) / len(senders)


def path_s(graph: Graph, here: Place, there: Place) -> float:
    """Returns the latency of the quickest way between two places."""
    return float(nx.dijkstra_path_length(graph, here, there, weight="latency_s"))
