"""Seconds of collectives by alpha-beta formulas on the links of a cluster.

Symbols: n payload bytes, g ranks, a latency of one message, b bytes/s of the link. Rings as
in Thakur, Rabenseifner, Gropp (2005); a group that spans nodes goes in two levels: inside
the node first, then one ring between nodes for each local rank, each on its own NIC.
Payload conventions are those of CommTable.
"""

from __future__ import annotations

import numpy as np

from flopwright.ops import Array, Collective
from flopwright.simulator.collectives.topology import GroupShape
from flopwright.spec.cluster import ClusterSpec, LinkSpec


def _ring(n: Array, g: Array, link: LinkSpec, passes: int) -> Array:
    """Returns passes * (g-1) * (a + n / (g * b)): a pass is a reduce-scatter or a gather."""
    return np.asarray(passes * (g - 1) * (link.latency_s + n / (g * link.bytes_per_s)))


def _two_levels(n: Array, group: GroupShape, cluster: ClusterSpec, passes: int) -> Array:
    inside = _ring(n, group.local, cluster.node.link, passes)
    if cluster.network is None:
        return inside
    return np.asarray(inside + _ring(n / group.local, group.nodes, cluster.network, passes))


def all_reduce_s(n: Array, group: GroupShape, cluster: ClusterSpec) -> Array:
    """Returns 2 (g-1) (a + n / (g b)): a reduce-scatter and an all-gather."""
    return _two_levels(n, group, cluster, 2)


def gather_scatter_s(n: Array, group: GroupShape, cluster: ClusterSpec) -> Array:
    """Returns (g-1) (a + n / (g b)): all-gather of n output, reduce-scatter of n input bytes."""
    return _two_levels(n, group, cluster, 1)


def broadcast_s(n: Array, group: GroupShape, cluster: ClusterSpec) -> Array:
    """Returns (g-1) a + n / b of a pipelined chain: latencies add, the slowest link paces it."""
    link, net = cluster.node.link, cluster.network
    latency = (group.local - 1) * link.latency_s
    stream = np.where(group.local > 1, n / link.bytes_per_s, 0.0)
    if net is not None:
        latency = latency + (group.nodes - 1) * net.latency_s
        stream = np.maximum(stream, np.where(group.spans, n / net.bytes_per_s, 0.0))
    return np.asarray(latency + stream)


def all_to_all_s(
    n: Array, group: GroupShape, cluster: ClusterSpec, copies: int | None = None
) -> Array:
    """Returns the seconds of an exchange in which n bytes leave a rank, equal parts to each other.

    What goes to the rank's own node takes the node's link, the rest its NIC. With `copies`,
    a token is on its way to that many experts drawn at random: a node is sent it once, and
    the node's link spreads it, once to a rank (DeepEP). The two parts are pipelined: the
    slower one counts.
    """
    g, local, nodes = group.size, group.local, group.nodes
    others = np.maximum(g - 1, 1.0)
    near, far = n * (local - 1) / others, n * (g - local) / others
    if copies:
        rows = n * g / others / copies  # one copy of each token
        near = rows * _distinct(g, copies) * (local - 1) / local
        far = rows * _distinct(nodes, copies) * (nodes - 1) / nodes
    link, net = cluster.node.link, cluster.network
    on_node = (local - 1) * link.latency_s + near / link.bytes_per_s
    if net is None:
        return np.asarray(on_node)
    across = (nodes - 1) * net.latency_s + far / net.bytes_per_s
    return np.asarray(np.maximum(on_node, across))


def send_recv_s(n: Array, group: GroupShape, cluster: ClusterSpec) -> Array:
    """Returns a + n / b on the link between the two ranks of the group."""
    link, net = cluster.node.link, cluster.network
    near = link.latency_s + n / link.bytes_per_s
    if net is None:
        return np.asarray(near)
    return np.asarray(np.where(group.spans, net.latency_s + n / net.bytes_per_s, near))


def _distinct(places: Array, draws: int) -> Array:
    """Returns how many of `places` equal places `draws` random draws touch, on average."""
    return np.asarray(places * (1 - (1 - 1 / places) ** draws))


FORMULAS = {
    Collective.ALL_REDUCE: all_reduce_s,
    Collective.ALL_GATHER: gather_scatter_s,
    Collective.REDUCE_SCATTER: gather_scatter_s,
    Collective.SEND_RECV: send_recv_s,
    Collective.BROADCAST: broadcast_s,
}
