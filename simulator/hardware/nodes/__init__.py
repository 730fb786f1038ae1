"""Node types by name: what a node of H100s, of MI300Xs or of an NVL72 rack is made of."""

from flopwright.simulator.hardware.nodes.types import (
    NodeType,
    cluster_of,
    node_type,
    node_type_names,
    usual_node_type,
)

__all__ = ["NodeType", "cluster_of", "node_type", "node_type_names", "usual_node_type"]
