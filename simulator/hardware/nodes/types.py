"""Which nodes there are: one YAML file a type, each number with its source.

A file has the fields of `NodeType`. Its `node` is that of a cluster file without the GPU,
which is named beside it and comes from the GPU catalog.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from pydantic import Field

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.spec.base import Spec
from flopwright.spec.cluster import ClusterSpec, FabricSpec, LinkSpec, NodeSpec
from flopwright.spec.load import load_gpu
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import read_yaml
from flopwright.units import UsdPerHour

FOLDER: Final = Path(__file__).parent


class NodeType(Spec):
    """A kind of node, and how nodes of its kind are usually joined.

    Attributes:
        also: other names of the same thing ("dgx_h100" of hgx_h100).
        gpu: name of its GPU in the catalog; node.gpu is the record.
        usual_for_gpu: whether a GPU that is named without a node is taken to be in this one.
        network: link between nodes, per GPU; None of a node that stands alone.
        price_usd_per_gpu_h: a list price, where there is one; None if unknown.
        sources: where the numbers outside of links come from, by field.
    """

    name: str = Field(min_length=1)
    also: tuple[str, ...] = ()
    gpu: str
    usual_for_gpu: bool = False
    node: NodeSpec
    network: LinkSpec | None = None
    fabric: FabricSpec | None = None
    storage: LinkSpec | None = None
    price_usd_per_gpu_h: UsdPerHour | None = Field(default=None, alias="price_per_gpu")
    sources: dict[str, str] = Field(min_length=1)


@cache
def _files() -> dict[str, NodeType]:
    found: dict[str, NodeType] = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        document = read_yaml(path)
        document.data["node"]["gpu"] = load_gpu(document.data["gpu"]).to_data()
        record = validate(NodeType, document)
        for name in (record.name, *record.also):
            assert name not in found, f"two node types are called {name}"
            found[name] = record
    return found


def node_type_names() -> tuple[str, ...]:
    """Returns the names that `node_type` knows, sorted, other names included."""
    return tuple(sorted(_files()))


def node_type(name: str) -> NodeType:
    """Returns a node type by one of its names.

    Raises:
        InputError: no such node type.
    """
    known = _files()
    if name not in known:
        raise InputError(
            Violation(
                field="node_type",
                value=repr(name),
                rule="no such node type",
                nearest_fix=did_you_mean(name, known),
            )
        )
    return known[name]


def usual_node_type(gpu: str) -> NodeType:
    """Returns the node type that a GPU of the catalog is usually found in.

    Raises:
        InputError: no node type holds this GPU.
    """
    mine = [t for t in _files().values() if t.gpu == gpu]
    if not mine:
        known = {t.gpu for t in _files().values()}
        raise InputError(
            Violation(
                field="gpu",
                value=repr(gpu),
                rule="no node type holds this GPU",
                nearest_fix=did_you_mean(gpu, known),
            )
        )
    return next((t for t in mine if t.usual_for_gpu), mine[0])


def cluster_of(kind: NodeType | str, num_gpus: int, name: str = "") -> ClusterSpec:
    """Returns a cluster of the fewest nodes of one type that hold `num_gpus` GPUs.

    A job smaller than a node gets a node of its own size, as a share of a real one.

    Raises:
        InputError: an unknown type, no GPUs, or more than one node of a type without network.
    """
    found = node_type(kind) if isinstance(kind, str) else kind
    if num_gpus < 1:
        raise InputError(
            Violation(field="num_gpus", value=str(num_gpus), rule="at least one GPU is needed")
        )
    node = found.node
    nodes = -(-num_gpus // node.gpus)
    if found.network is None and num_gpus > node.domain_gpus:
        raise InputError(
            Violation(
                field="node_type",
                value=found.name,
                rule=f"{nodes} nodes need a network, and this type has none",
            )
        )
    return ClusterSpec.model_validate(
        {
            "name": name or f"{num_gpus}_{found.name}",
            "num_nodes": nodes,
            "node": node.to_data(),
            "network": found.network.to_data() if found.network else None,
            "fabric": found.fabric.to_data() if found.fabric else None,
            "storage": found.storage.to_data() if found.storage else None,
            "price_usd_per_gpu_h": found.to_data().get("price_per_gpu"),
            "price_source": found.sources.get("price_per_gpu", ""),
        }
    )
