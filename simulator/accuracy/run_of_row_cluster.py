"""The cluster that a published run used: its GPU's usual nodes, changed by what the notes say."""

from __future__ import annotations

import re
from typing import Final

from flopwright.simulator.accuracy.rows import Configuration
from flopwright.simulator.hardware.nodes.types import NodeType, cluster_of, node_type
from flopwright.simulator.hardware.nodes.types import usual_node_type as usual
from flopwright.spec.cluster import ClusterSpec

NOTED: Final = "as_noted"
_BITS: Final = 8.0
# Networks known by the machine or the fabric that notes name: bits/s of a node of 8 GPUs.
_NODE_BITS_PER_S: Final = ((r"jean ?zay|omni-?path", 400e9),)
# Large GH200 machines (Alps, JUPITER) have nodes of four, each pair joined by NVLink.
_QUAD: Final = 4
_AWS: Final = {
    "a100_sxm_40gb": "aws_p4d", "a100_sxm_80gb": "aws_p4de", "h100_sxm": "aws_p5",
    "h200_sxm": "aws_p5en", "b200": "aws_p6_b200",
}  # fmt: skip


def cluster_of_row(
    configuration: Configuration, gpu: str, num_gpus: int
) -> tuple[ClusterSpec, tuple[str, ...]]:
    """Returns a run's cluster and what was assumed of it.

    Raises:
        InputError: a GPU that no node type holds.
    """
    kind, assumed = _node_type(configuration, gpu)
    per_node = _gpus_per_node(configuration) or kind.node.gpus
    tp = configuration.whole("tp") or 1
    if gpu == "gh200" and per_node < tp <= _QUAD:
        per_node = _QUAD
        assumed.append(f"nodes of {_QUAD} GH200: a tensor parallel group needs NVLink")
    bits = _bits_per_s_of_gpu(configuration, per_node)
    changed = as_noted(kind, per_node, bits / _BITS if bits is not None else None)
    if bits is None and num_gpus > changed.node.domain_gpus:
        assumed.append(f"network of {kind.name}")
    return cluster_of(changed, num_gpus), tuple(assumed)


def as_noted(
    kind: NodeType, gpus_per_node: int | None, network_bytes_per_s: float | None
) -> NodeType:
    """Returns a node type with what a publication says of it: GPUs a node, a GPU's network."""
    node, network = kind.node, kind.network
    if gpus_per_node is not None and gpus_per_node != node.gpus:
        change = {"gpus": gpus_per_node, "nvlink_domain_gpus": None, "nics": None}
        node = node.model_copy(update=change)
    if network_bytes_per_s is not None and network is not None:
        link = {"name": NOTED, "bytes_per_s": network_bytes_per_s, "source": "the publication"}
        network = network.model_copy(update=link)
    return kind.model_copy(update={"node": node, "network": network})


def _node_type(configuration: Configuration, gpu: str) -> tuple[NodeType, list[str]]:
    said = " ".join(
        (configuration.notes, configuration.text("source"), configuration.text("gpu"))
    ).lower()
    named = re.search(r"\b(p4de?|p5en?|p6)\b", said)
    if (named or "aws" in said) and gpu in _AWS:
        return node_type(_AWS[gpu]), []
    kind = usual(gpu)
    return kind, [f"nodes of the kind {kind.name}"]


def _gpus_per_node(configuration: Configuration) -> int | None:
    said = f"{configuration.notes} {configuration.text('source')}"
    found = re.search(r"(\d+) GPUs? (?:per|a) node", said, re.IGNORECASE) or re.search(
        r"x(\d{1,2})(?:H[12]00|A100|B[23]00|L40S)", said
    )
    count = int(found[1]) if found else 0
    return count if 1 <= count <= 1024 else None


def _bits_per_s_of_gpu(configuration: Configuration, gpus: int) -> float | None:
    """Returns a GPU's share of its node's network, in bits/s, where the notes give one."""
    notes = configuration.notes.lower().replace(",", "")
    each = re.search(r"(\d+) ?gb(?:ps|it/s|/s)?[^;.]*per gpu", notes)
    if each:
        return float(each[1]) * 1e9
    several = re.search(r"(\d+) ?x ?(\d+) ?gb?(?:ps|it/s|/s)?\b", notes)
    if several:
        return float(several[1]) * float(several[2]) * 1e9 / gpus
    whole = re.search(r"(\d+) ?gb(?:ps|it/s|/s) (?:per node|a node|node-node)", notes)
    if whole:
        return float(whole[1]) * 1e9 / gpus
    machine = next((b for pattern, b in _NODE_BITS_PER_S if re.search(pattern, notes)), None)
    return machine / gpus if machine is not None else None
