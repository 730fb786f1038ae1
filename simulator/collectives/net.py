"""What a group finds on its way: latencies and streams on its node's link and on the network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from flopwright.ops import Array
from flopwright.simulator.collectives.curves import LinkCurves, Table, load_link, table
from flopwright.simulator.collectives.levels import Levels, levels
from flopwright.simulator.collectives.topology import GroupShape, leaf_nodes
from flopwright.spec.cluster import ClusterSpec

# Which fitted curve stands for a pattern that the tables do not hold, in this order.
_CURVE_FOR: Final = {
    "all_reduce_ring": (),
    "all_gather_ring": ("all_reduce_ring",),
    "reduce_scatter_ring": ("all_gather_ring", "all_reduce_ring"),
    "all_to_all_pairs": ("all_gather_ring", "all_reduce_ring"),
    "moe_dispatch": ("all_to_all_pairs", "all_gather_ring", "all_reduce_ring"),
    "moe_combine": ("all_to_all_pairs", "all_gather_ring", "all_reduce_ring"),
}
_NETWORK: Final = {"ring": (), "tree": ("ring",), "all_to_all": ("ring",)}


@dataclass(frozen=True, slots=True)
class Net:
    """A cluster's levels and the fitted curves of its links, where they have any.

    Attributes:
        near, far: curves by pattern of the node's link and of the network; empty where the
            link has none and counts as what its LinkSpec says, at every size.
        near_hop_s: seconds that a rank inside a node adds to one pass of a ring.
        far_hop_s: seconds that any rank adds to one over nodes; None without curves.
        nvls_above, max_adapters: see LinkCurves; infinite of no limit.
    """

    levels: Levels
    near: dict[str, Table]
    far: dict[str, Table]
    near_hop_s: float
    far_hop_s: float | None
    nvls_above: int | None
    max_adapters: float

    @property
    def spans(self) -> bool:
        """Whether there is a network to span."""
        return self.levels.far_bytes_per_s > 0


def make_net(on: Levels, near: LinkCurves | None, far: LinkCurves | None) -> Net:
    """Returns levels with the curves of the node's link and of the network."""
    nvls = near.nvls_above if near and "all_reduce_nvls" in near.curves else None
    return Net(
        levels=on,
        near=_tables(near, _CURVE_FOR | {"all_reduce_nvls": ()}) if near else {},
        far=_tables(far, _NETWORK) if far else {},
        near_hop_s=near.hop_s if near else on.near_latency_s,
        far_hop_s=far.hop_s if far else None,
        nvls_above=nvls,
        max_adapters=(near.max_adapters if near else None) or math.inf,
    )


def _tables(link: LinkCurves, names: dict[str, tuple[str, ...]]) -> dict[str, Table]:
    found = {}
    for name, others in names.items():
        measured = [n for n in (name, *others) if n in link.curves]
        if measured:
            found[name] = table(link, measured[0])
    return found


_known: dict[tuple[object, ...], Net] = {}
_MAX_KNOWN: Final = 512


def net_of(cluster: ClusterSpec) -> Net:
    """Returns the levels of a cluster with the curves that its links name.

    Raises:
        InputError: a link names curves that there are not.
    """
    node, network = cluster.node, cluster.network
    shape = (node.gpus, node.domain_gpus, node.link_layout, node.nics, leaf_nodes(cluster))
    key = (shape, node.link, network, cluster.fabric)
    found = _known.get(key)
    if found is None:
        near = load_link(node.link.curve) if node.link.curve else None
        far = load_link(network.curve) if network and network.curve else None
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        found = _known[key] = make_net(levels(cluster), near, far)
    return found


def near_base_s(net: Net, name: str, ranks: Array, passes: float) -> Array:
    """Returns seconds of an empty call inside a node."""
    if not net.near:
        return np.asarray(passes * (ranks - 1) * net.near_hop_s)
    return net.near[name].empty_s(ranks, passes)


def near_stream_s(net: Net, name: str, ranks: Array, wire: Array) -> Array:
    """Returns seconds of moving `wire` bytes a GPU inside a node; 0 of a lone rank."""
    on, rate = net.levels, net.levels.near_bytes_per_s
    each: Array | float = rate
    if on.mesh_gpus:
        each = rate * np.maximum(ranks - 1, 1) / (on.mesh_gpus - 1)
    found = net.near[name].stream_s(ranks, wire, each) if net.near else wire / each
    return np.asarray(found * (ranks > 1))


def far_stream_s(net: Net, group: GroupShape, wire: Array, name: str = "ring") -> Array:
    """Returns seconds of moving `wire` bytes an adapter between neighbours of a group.

    A leaf is left by as many streams as there are groups side by side; they share its way up.
    """
    on = net.levels
    rate: Array | float = on.far_bytes_per_s
    if on.spine_bytes_per_s < on.far_bytes_per_s:
        streams = np.maximum(group.apart, float(on.domain_gpus))
        shared = np.minimum(rate, on.spine_bytes_per_s * on.leaf_gpus / streams)
        rate = np.where(group.size * group.apart > on.leaf_gpus, shared, rate)
    if not net.far:
        return np.asarray(wire / rate)
    return net.far[name].stream_s(group.nodes, wire, rate)


def far_latency_s(net: Net, group: GroupShape) -> Array | float:
    """Returns seconds of one message from node to node."""
    on = net.levels
    if on.spine_latency_s <= on.far_latency_s:
        return on.far_latency_s
    leaves = group.size * group.apart > on.leaf_gpus
    return np.where(leaves, on.spine_latency_s, on.far_latency_s)


def far_base_s(net: Net) -> float:
    """Returns seconds of an empty call over nodes, beside the hops."""
    return float(net.far["ring"].base_s[-1]) if net.far else 0.0
