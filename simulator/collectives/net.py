"""What a group finds on its way: latencies and streams on its node's link and on the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from flopwright.ops import Array
from flopwright.simulator.collectives.curves import LinkCurves, base_s, load_link, stream_s
from flopwright.simulator.collectives.levels import Levels, levels
from flopwright.simulator.collectives.topology import GroupShape
from flopwright.spec.cluster import ClusterSpec

# Which fitted curve stands for a pattern that the tables do not hold, in this order.
_CURVE_FOR: Final = {
    "all_gather_ring": ("all_reduce_ring",),
    "reduce_scatter_ring": ("all_gather_ring", "all_reduce_ring"),
    "all_to_all_pairs": ("all_gather_ring", "all_reduce_ring"),
    "moe_dispatch": ("all_to_all_pairs", "all_gather_ring", "all_reduce_ring"),
    "moe_combine": ("all_to_all_pairs", "all_gather_ring", "all_reduce_ring"),
}


@dataclass(frozen=True, slots=True)
class Net:
    """A cluster's levels and the fitted curves of its links, where they have any."""

    levels: Levels
    near: LinkCurves | None = None
    far: LinkCurves | None = None

    @property
    def spans(self) -> bool:
        """Whether there is a network to span."""
        return self.levels.far_bytes_per_s > 0


def _curve_name(link: LinkCurves, name: str) -> str:
    return next(n for n in (name, *_CURVE_FOR.get(name, ())) if n in link.curves)


def _near_rate(local: Array, net: Net) -> Array | float:
    """Returns bytes/s of a GPU towards `local` - 1 others of its node."""
    on = net.levels
    if not on.mesh_gpus:
        return on.near_bytes_per_s
    return np.asarray(on.near_bytes_per_s * np.maximum(local - 1, 1) / (on.mesh_gpus - 1))


def near_base_s(net: Net, name: str, ranks: Array, passes: float) -> Array:
    """Returns seconds of an empty call inside a node."""
    if net.near is None:
        return np.asarray(passes * (ranks - 1) * net.levels.near_latency_s)
    return base_s(net.near, _curve_name(net.near, name), ranks, passes)


def near_stream_s(net: Net, name: str, ranks: Array, wire: Array) -> Array:
    """Returns seconds of moving `wire` bytes a GPU inside a node; 0 of a lone rank."""
    rate = _near_rate(ranks, net)
    if net.near is None:
        return np.where(ranks > 1, wire / rate, 0.0)
    found = stream_s(net.near, _curve_name(net.near, name), ranks, wire, np.asarray(rate))
    return np.where(ranks > 1, found, 0.0)


def far_stream_s(net: Net, group: GroupShape, wire: Array, name: str = "ring") -> Array:
    """Returns seconds of moving `wire` bytes an adapter between neighbours of a group.

    A leaf is left by as many streams as there are groups side by side; they share its way up.
    """
    on = net.levels
    streams = np.maximum(group.apart, float(on.domain_gpus))
    shared = on.spine_bytes_per_s * on.leaf_gpus / streams
    leaves = group.size * group.apart > on.leaf_gpus
    rate = np.where(leaves, np.minimum(on.far_bytes_per_s, shared), on.far_bytes_per_s)
    if net.far is None:
        return np.asarray(wire / rate)
    curve = name if name in net.far.curves else "ring"
    return stream_s(net.far, curve, group.nodes, wire, rate)


def far_latency_s(net: Net, group: GroupShape) -> Array:
    """Returns seconds of one message from node to node."""
    on = net.levels
    leaves = group.size * group.apart > on.leaf_gpus
    return np.where(leaves, on.spine_latency_s, on.far_latency_s)


def far_base_s(net: Net) -> float:
    """Returns seconds of an empty call over nodes, beside the hops."""
    return net.far.curves["ring"][0].base_s if net.far else 0.0


def hop_s(net: Net) -> float:
    """Returns seconds that a rank inside a node adds to one pass of a ring."""
    return net.near.hop_s if net.near else net.levels.near_latency_s


def net_of(cluster: ClusterSpec) -> Net:
    """Returns the levels of a cluster with the curves that its links name.

    Raises:
        InputError: a link names curves that there are not.
    """
    near, network = cluster.node.link, cluster.network
    return Net(
        levels=levels(cluster),
        near=load_link(near.curve) if near.curve else None,
        far=load_link(network.curve) if network and network.curve else None,
    )
