"""Seconds of each algorithm of a collective on the levels of a cluster.

Symbols: n payload bytes, g ranks, l of them on each of N nodes (NVLink domains), a latency of
one message, b bytes/s of the link. Rings as in Thakur, Rabenseifner, Gropp (2005), double
binary trees as in Sanders, Speck, Traeff (2009). A ring over nodes is pipelined: it enters
and leaves a node by all l adapters of the group, so the slower of node link and adapters
paces it. Payload conventions are those of CommTable. Where a link has fitted curves
(`curves.py`), they give the latency and the share of b that a message reaches.
"""

from __future__ import annotations

import numpy as np

from flopwright.ops import Array, Collective
from flopwright.simulator.collectives.net import (
    Net,
    far_base_s,
    far_latency_s,
    far_stream_s,
    near_base_s,
    near_stream_s,
)
from flopwright.simulator.collectives.topology import GroupShape


def ring_s(n: Array, group: GroupShape, net: Net, passes: int, name: str) -> Array:
    """Returns passes * ((g-1) a + n (g-1) / (g b)); a pass is a reduce-scatter or a gather.

    Over nodes b is the slower of the node's link and l adapters, and a network with fitted
    curves gives what each further rank adds (alpha x ranks).
    """
    g, local, nodes = group.size, group.local, group.nodes
    wire = passes * n * (g - 1) / g
    near = near_stream_s(net, name, local, wire)
    inside = near_base_s(net, name, g, passes) + near
    if not net.spans:
        return np.asarray(inside)
    steps = (g - nodes) * net.near_hop_s if net.far_hop_s is None else (g - 1) * net.far_hop_s
    latency = far_base_s(net) + passes * (steps + (nodes - 1) * far_latency_s(net, group))
    far = far_stream_s(net, group, wire / np.minimum(local, net.max_adapters))
    return np.where(group.spans, latency + np.maximum(near, far), inside)


def tree_s(n: Array, group: GroupShape, net: Net) -> Array:
    """Returns an all-reduce up and down double binary trees of nodes, chains inside them.

    2 (ceil(log2 N) a_net + (l-1) a) + 2 n over the slower of the link and l adapters; of two
    nodes, one is the root of one tree and a leaf of the other, and n leaves each.
    """
    local = group.local
    hop = far_latency_s(net, group) + (net.far_hop_s or 0.0)
    depth = np.ceil(np.log2(group.nodes))
    latency = far_base_s(net) + 2 * (depth * hop + (local - 1) * net.near_hop_s)
    near = near_stream_s(net, "all_reduce_ring", local, 2 * n)
    return np.asarray(latency + np.maximum(near, _between_nodes(n, group, net)))


def _between_nodes(n: Array, group: GroupShape, net: Net) -> Array:
    """Returns seconds of what double binary trees send from node to node."""
    sent = n * np.where(group.nodes > 2, 2.0, 1.0)
    each = sent / np.minimum(group.local, net.max_adapters)
    return far_stream_s(net, group, each, "tree")


def nvls_s(n: Array, group: GroupShape, net: Net) -> Array:
    """Returns an all-reduce in which the switch adds up: a GPU sends n (1 + 1/l) bytes.

    Over nodes a double binary tree joins the switches. Infinite where there is no such
    switch, or too few GPUs on a node for NCCL to choose it.
    """
    local, above = group.local, net.nvls_above
    if above is None or not (local > above).any():
        return np.full(np.broadcast(n, local).shape, np.inf)
    base = near_base_s(net, "all_reduce_nvls", local, 0.0)
    stream = near_stream_s(net, "all_reduce_nvls", local, n * (1 + 1 / local))
    if net.spans:
        depth = np.ceil(np.log2(group.nodes))
        tree = far_base_s(net) + 2 * depth * far_latency_s(net, group)
        far = _between_nodes(n, group, net)
        base = base + np.where(group.spans, tree, 0.0)
        stream = np.where(group.spans, np.maximum(stream, far), stream)
    return np.where(local > above, base + stream, np.inf)


def hierarchical_s(n: Array, group: GroupShape, net: Net) -> Array:
    """Returns an all-reduce in three steps: scatter in the node, all-reduce across, gather.

    Three calls that a program makes itself (hybrid sharding), not an algorithm of NCCL's.
    2 ((l-1) a + n (l-1) / (l b)) + 2 ((N-1) a_net + n (N-1) / (l N b_net)).
    """
    local, nodes = group.local, group.nodes
    part = n * (local - 1) / local
    inside = np.zeros(1)
    for name in ("reduce_scatter_ring", "all_gather_ring"):
        step = near_base_s(net, name, local, 1) + near_stream_s(net, name, local, part)
        inside = inside + step * (local > 1)
    hop = far_latency_s(net, group) + (net.far_hop_s or 0.0)
    across = far_base_s(net) + 2 * (nodes - 1) * hop
    return np.asarray(inside + across + far_stream_s(net, group, 2 * (n - part) * (1 - 1 / nodes)))


def all_reduce_algorithms(n: Array, group: GroupShape, net: Net) -> dict[str, Array]:
    """Returns the seconds of each of NCCL's algorithms; infinite where one does not apply."""
    out = {"ring": ring_s(n, group, net, 2, "all_reduce_ring")}
    if net.nvls_above is not None:
        out["nvls"] = nvls_s(n, group, net)
    if net.spans and group.spans.any():
        out["tree"] = np.where(group.spans, tree_s(n, group, net), np.inf)
    return out


def all_reduce_s(n: Array, group: GroupShape, net: Net) -> Array:
    """Returns the seconds of the fastest algorithm at this size, as NCCL's tuner picks one."""
    best, *others = all_reduce_algorithms(n, group, net).values()
    for seconds in others:
        best = np.minimum(best, seconds)
    return best


def all_gather_s(n: Array, group: GroupShape, net: Net) -> Array:
    """Returns (g-1) a + n (g-1) / (g b) of n bytes of output."""
    return ring_s(n, group, net, 1, "all_gather_ring")


def reduce_scatter_s(n: Array, group: GroupShape, net: Net) -> Array:
    """Returns (g-1) a + n (g-1) / (g b) of n bytes of input."""
    return ring_s(n, group, net, 1, "reduce_scatter_ring")


def broadcast_s(n: Array, group: GroupShape, net: Net) -> Array:
    """Returns (g-1) a + n / b of a pipelined chain: latencies add, the slowest link paces it."""
    name, local, nodes = "all_gather_ring", group.local, group.nodes
    inside = near_base_s(net, name, group.size, 1) + near_stream_s(net, name, group.size, n)
    if not net.spans:
        return np.asarray(inside)
    latency = (
        far_base_s(net) + (nodes - 1) * far_latency_s(net, group) + (local - 1) * net.near_hop_s
    )
    stream = np.maximum(near_stream_s(net, name, local, n), far_stream_s(net, group, n))
    return np.where(group.spans, latency + stream, inside)


def send_recv_s(n: Array, group: GroupShape, net: Net) -> Array:
    """Returns a + n / b on the link between the two ranks of the group."""
    two = np.full_like(group.size, 2.0)
    name = "all_to_all_pairs"
    near = near_base_s(net, name, two, 1) + near_stream_s(net, name, two, n)
    if not net.spans:
        return np.asarray(near)
    pair = GroupShape(size=two, local=np.ones_like(two), stride=group.apart)
    far = far_latency_s(net, pair) + far_stream_s(net, pair, n)
    return np.where(group.spans, far, near)


FORMULAS = {
    Collective.ALL_REDUCE: all_reduce_s,
    Collective.ALL_GATHER: all_gather_s,
    Collective.REDUCE_SCATTER: reduce_scatter_s,
    Collective.SEND_RECV: send_recv_s,
    Collective.BROADCAST: broadcast_s,
}
