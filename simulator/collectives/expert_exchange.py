"""Seconds of an all-to-all, among it the exchange of tokens between experts.

A plain exchange sends every copy of a token to the rank of its expert. DeepEP's sends a token
once to each node that holds some of its experts and once, inside the node, to each rank that
does; node-limited routing caps the nodes.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from flopwright.ops import Array
from flopwright.simulator.collectives.net import (
    Net,
    far_latency_s,
    far_stream_s,
    near_base_s,
    near_stream_s,
)
from flopwright.simulator.collectives.topology import GroupShape

ExpertCall = Literal["dispatch", "combine"]


def distinct(places: Array, draws: float) -> Array:
    """Returns how many of `places` equal places `draws` random draws touch, on average."""
    return np.asarray(places * (1 - (1 - 1 / places) ** draws))


def node_limit_of(num_groups: int, top_k_groups: int, nodes: Array) -> Array:
    """Returns nodes that a token may go to where its experts come from few groups of experts.

    Groups are dealt to nodes in order: with more nodes than groups each spreads over
    nodes / groups of them (DeepSeek-V3, arXiv 2412.19437, section 2.1.2: 4 of 8 groups).
    """
    each = np.maximum(nodes / num_groups, 1.0)
    return np.asarray(np.minimum(nodes, np.ceil(top_k_groups * each)))


def wire_bytes(
    n: Array, group: GroupShape, copies: int | None, node_limit: Array | int | None
) -> tuple[Array, Array]:
    """Returns bytes that a rank puts on its node's link and on its adapter.

    Args:
        n: bytes that leave a rank as `copies` copies of each token to the other ranks.
        copies: experts of a token, sent to a node and to a rank of it once each (DeepEP);
            None sends equal parts to each other rank.
        node_limit: nodes that a token may go to at most; None of any.
    """
    g, local, nodes = group.size, group.local, group.nodes
    others = np.maximum(g - 1, 1.0)
    if not copies:
        return np.asarray(n * (local - 1) / others), np.asarray(n * (g - local) / others)
    rows = n * g / others / copies  # one copy of each token
    reached, ranks = nodes, g
    if node_limit is not None:
        reached = np.minimum(nodes, node_limit)
        ranks = reached * local
    near = rows * distinct(ranks, copies) * (local - 1) / local
    far = rows * distinct(reached, copies) * (nodes - 1) / nodes
    return np.asarray(near), np.asarray(far)


def all_to_all_s(
    n: Array,
    group: GroupShape,
    net: Net,
    copies: int | None = None,
    *,
    call: ExpertCall = "combine",
    node_limit: Array | int | None = None,
    skew: Array | float = 1.0,
) -> Array:
    """Returns the seconds of an exchange in which n bytes leave a rank.

    What goes to the rank's own node takes the node's link, the rest its adapter, and what
    leaves a leaf its share of the way up; the parts are pipelined and the slowest counts.

    Args:
        copies, node_limit: see wire_bytes.
        call: which of the two calls of an expert exchange it is, for its fitted curve.
        skew: bytes of the busiest rank over the mean: it keeps all others waiting.
    """
    g, local, nodes = group.size, group.local, group.nodes
    near, far = (part * skew for part in wire_bytes(n, group, copies, node_limit))
    name = f"moe_{call}" if copies else "all_to_all_pairs"
    on_node = near_stream_s(net, name, local, near) + near_base_s(net, name, local, 1)
    on_node = np.where(local > 1, on_node, 0.0)
    if not net.spans:
        return np.asarray(on_node)
    on, alone = net.levels, GroupShape(size=g, local=local)
    across = (nodes - 1) * far_latency_s(net, group) + far_stream_s(net, alone, far, "all_to_all")
    if on.spine_bytes_per_s < on.far_bytes_per_s:
        leaves = np.ceil(g * group.apart / on.leaf_gpus)
        beyond = far * (1 - 1 / leaves) / np.maximum(1 - 1 / nodes, 1 / nodes)
        across = np.maximum(across, beyond / on.spine_bytes_per_s)
    return np.where(group.spans, np.maximum(on_node, across), on_node)
