"""Node types: every file loads, each number has its source, unknown names are refused."""

from pathlib import Path

import pytest
import yaml

from flopwright.errors import InputError
from flopwright.simulator.collectives.topology import group_shape
from flopwright.simulator.hardware.nodes import (
    cluster_of,
    node_type,
    node_type_names,
    usual_node_type,
)
from flopwright.simulator.hardware.nodes.types import FOLDER
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.load import GPU_CATALOG, catalog_names, load_cluster

_OF_LINKS = {"name", "link", "host_link", "nvme"}
_WORDS = {"link_layout"}  # no numbers


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_number_has_a_source(path: Path) -> None:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert data["name"] == path.stem
    numbers = set(data["node"]) - _OF_LINKS - _WORDS
    missing = numbers - set(data["sources"])
    nics_are_one_a_gpu = data["node"].get("nics") == data["node"]["gpus"]
    assert missing <= ({"nics"} if nics_are_one_a_gpu else set())


@pytest.mark.parametrize("gpu", catalog_names(GPU_CATALOG))
def test_every_gpu_of_the_catalog_has_a_usual_node(gpu: str) -> None:
    found = usual_node_type(gpu)
    assert found.usual_for_gpu
    assert found.node.gpu.name == gpu


@pytest.mark.parametrize("name", node_type_names())
def test_a_cluster_of_it_writes_and_reads_back(name: str) -> None:
    cluster = cluster_of(name, 1024)
    assert cluster.num_gpus == 1024
    assert ClusterSpec.model_validate(cluster.to_data()) == cluster
    assert name in (node_type(name).name, *node_type(name).also)


def test_a_rack_of_72_is_one_domain() -> None:
    node = node_type("gb200_nvl72").node
    assert (node.gpus, node.domain_gpus) == (4, 72)
    inside = group_shape([64, 72, 128], [1, 1, 1], node.domain_gpus)
    assert inside.spans.tolist() == [False, False, True]
    assert inside.local.tolist() == [64, 72, 64]
    assert inside.nodes.tolist() == [1, 1, 2]
    assert node_type("hgx_h100").node.domain_gpus == 8


@pytest.mark.parametrize("size", range(1, 200))
@pytest.mark.parametrize("gpus", [4, 6, 8, 72])
def test_nodes_are_as_few_as_hold_the_group(size: int, gpus: int) -> None:
    shape = group_shape([size], [1], gpus)
    assert shape.nodes[0] == -(-size // gpus)
    assert shape.local[0] * shape.nodes[0] == pytest.approx(size)


def test_unknown_names_and_no_gpus_are_refused() -> None:
    with pytest.raises(InputError, match="hgx_h100"):
        node_type("hgx_h10")
    with pytest.raises(InputError, match="no node type holds"):
        usual_node_type("abacus")
    with pytest.raises(InputError, match="at least one GPU"):
        cluster_of("hgx_h100", 0)


def test_a_domain_holds_whole_nodes() -> None:
    data = cluster_of("gb200_nvl72", 8).to_data()
    data["node"]["nvlink_domain_gpus"] = 70
    with pytest.raises(ValueError, match="multiple of gpus"):
        ClusterSpec.model_validate(data)


def test_nodes_of_one_domain_need_no_network() -> None:
    data = cluster_of("gb200_nvl72", 72).to_data()
    del data["network"]
    assert ClusterSpec.model_validate(data).num_nodes == 18
    data["num_nodes"] = 19
    with pytest.raises(ValueError, match="network"):
        ClusterSpec.model_validate(data)


@pytest.mark.parametrize(
    ("cluster", "kind"),
    [
        ("8_h100", "hgx_h100"),
        ("64_h100", "hgx_h100"),
        ("1024_h100", "hgx_h100"),
        ("64_a100", "hgx_a100"),
        ("64_h200", "hgx_h200"),
        ("64_b200", "hgx_b200"),
        ("64_h100_aws_p5", "aws_p5"),
        ("576_gb200_nvl72", "gb200_nvl72"),
        ("64_mi300x", "mi300x_8gpu"),
    ],
)
def test_clusters_of_the_catalog_are_nodes_of_their_type(cluster: str, kind: str) -> None:
    found = load_cluster(cluster)
    assert found == cluster_of(kind, found.num_gpus, cluster)
