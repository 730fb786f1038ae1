"""The graph and the formulas cannot disagree: levels are cuts and paths of the whole graph."""

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.ops import Collective
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.collectives.levels import (
    between,
    cut_bytes_per_s,
    levels,
    path_s,
)
from flopwright.simulator.collectives.times import collective_seconds
from flopwright.simulator.collectives.topology import group_shape, shared_links, topology
from flopwright.simulator.hardware.nodes import cluster_of, node_type_names
from flopwright.spec.cluster import ClusterSpec

NONE = Calibration(id="none", created="", source="test")
NETWORK = frozenset({"gpu", "switch", "nic", "leaf", "spine"})


def _cluster(
    gpus: int = 4,
    nodes: int = 8,
    domain_nodes: int = 1,
    nics: int | None = None,
    leaf: int | None = None,
    over: float = 1.0,
    layout: str | None = None,
) -> ClusterSpec:
    data = cluster_of("hgx_h100", 8).to_data()
    link = {"name": "l", "bandwidth": "400 GB/s", "latency": "2 us", "source": "test"}
    node = data["node"] | {
        "gpus": gpus,
        "nvlink_domain_gpus": gpus * domain_nodes,
        "nics": nics,
        "link": link,
        "link_layout": layout,
    }
    network = link | {"name": "n", "bandwidth": "40 GB/s", "latency": "9 us"}
    fabric = {"oversubscription": over, "spine_latency": "3 us", "source": "test"}
    fabric |= {"nodes_per_leaf": leaf} if leaf else {}
    extra = {"num_nodes": nodes, "node": node, "network": network, "fabric": fabric}
    return ClusterSpec.model_validate(data | extra)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    gpus=st.sampled_from([2, 4, 8]),
    domain_nodes=st.sampled_from([1, 2, 3]),
    leaf_domains=st.sampled_from([2, 3]),
    leaves=st.sampled_from([2, 3]),
    over=st.sampled_from([1.0, 1.5, 4.0]),
    nics_shared=st.booleans(),
)
def test_levels_are_the_cuts_of_the_whole_graph(
    gpus: int, domain_nodes: int, leaf_domains: int, leaves: int, over: float, nics_shared: bool
) -> None:
    per_leaf = leaf_domains * domain_nodes
    nics = gpus // 2 if nics_shared else None
    cluster = _cluster(gpus, per_leaf * leaves, domain_nodes, nics, per_leaf, over)
    found = levels(cluster)
    graph = between(topology(cluster), NETWORK)
    ranks = [("gpu", r) for r in range(cluster.num_gpus)]
    domain, leaf = gpus * domain_nodes, gpus * per_leaf
    inside = between(graph, frozenset({"gpu", "switch"}))
    near = cut_bytes_per_s(inside, ranks[:1], ranks[1:domain])
    assert found.near_bytes_per_s == pytest.approx(near)
    far = cut_bytes_per_s(graph, ranks[:domain], ranks[domain : 2 * domain])
    assert found.far_bytes_per_s == pytest.approx(far)
    spine = cut_bytes_per_s(graph, ranks[:leaf], ranks[leaf : 2 * leaf])
    assert found.spine_bytes_per_s == pytest.approx(spine)
    assert found.spine_bytes_per_s == pytest.approx(40e9 / over)
    assert found.near_latency_s == pytest.approx(path_s(inside, ranks[0], ranks[1]))
    assert found.far_latency_s == pytest.approx(path_s(graph, ranks[0], ranks[domain]))
    assert found.spine_latency_s == pytest.approx(path_s(graph, ranks[0], ranks[leaf]))


def test_a_mesh_gives_two_gpus_one_of_its_links() -> None:
    cluster = _cluster(8, 1, layout="mesh")
    graph = topology(cluster)
    assert graph.edges[("gpu", 0), ("gpu", 5)]["capacity"] == pytest.approx(400e9 / 7)
    assert levels(cluster).near_bytes_per_s == pytest.approx(400e9)
    for g in (2, 8):
        group, inside = group_shape([g], [1], 8), [("gpu", r) for r in range(g)]
        part = between(graph.subgraph(inside), frozenset({"gpu"}))
        rate = cut_bytes_per_s(part, inside[:1], inside[1:])
        seconds = collective_seconds(Collective.ALL_GATHER, 8e12, group, cluster, NONE).seconds[0]
        assert seconds == pytest.approx(8e12 * (g - 1) / g / rate, rel=1e-4)


@pytest.mark.parametrize("kind", list(Collective))
@pytest.mark.filterwarnings("error")
def test_one_gpu_of_a_mesh_has_the_network_alone(kind: Collective) -> None:
    cluster = _cluster(1, 8, layout="mesh")
    seconds = collective_seconds(kind, 8e9, group_shape([8], [1], 1), cluster, NONE).seconds[0]
    assert 8e9 / 40e9 / 2 < seconds < 1


def test_host_memory_disks_and_storage_are_in_the_graph() -> None:
    cluster = cluster_of("hgx_h100", 16)
    graph = topology(cluster)
    assert nx.is_strongly_connected(graph)
    assert graph.edges[("gpu", 9), ("host", 1)]["capacity"] == 63e9
    assert graph.edges[("host", 1), ("host_memory", 1)]["capacity"] == 614e9
    assert graph.edges[("host", 0), ("nvme", 0)]["capacity"] == pytest.approx(8 * 3.1e9)
    found = levels(cluster)
    assert found.host_bytes_per_s == 63e9  # eight of them stay below 614 GB/s of memory
    assert found.nvme_bytes_per_s == pytest.approx(3.1e9)
    assert found.storage_bytes_per_s == 0.0


def test_gpus_share_the_memory_of_their_host() -> None:
    data = cluster_of("hgx_h100", 16).to_data()
    data["node"]["host_memory_bandwidth"] = "200 GB/s"
    link = {"name": "s", "bandwidth": "2 GB/s", "latency": "1 ms", "source": "test"}
    found = levels(ClusterSpec.model_validate(data | {"storage": link}))
    assert found.host_bytes_per_s == pytest.approx(200e9 / 8)
    assert found.storage_bytes_per_s == pytest.approx(2e9)


def test_an_oversubscribed_spine_slows_what_crosses_it() -> None:
    fast, slow = _cluster(nodes=8, leaf=4), _cluster(nodes=8, leaf=4, over=8.0)
    whole, half = group_shape([32], [1], 4), group_shape([16], [1], 4)
    for kind in (Collective.ALL_TO_ALL, Collective.SEND_RECV):
        a, b = (
            [float(collective_seconds(kind, 1e9, g, c, NONE).seconds[0]) for g in (half, whole)]
            for c in (fast, slow)
        )
        assert a[0] == pytest.approx(b[0])
        if kind is Collective.ALL_TO_ALL:
            assert b[1] > 3 * a[1]
    # A ring of whole nodes leaves a leaf by the four adapters of one node; the leaf's sixteen
    # have 1 / 8 of their bandwidth upwards, half of what those four could send.
    wire, far = 8e12 * 31 / 32, 16 * 40e9 / 8
    found = collective_seconds(Collective.ALL_GATHER, 8e12, whole, slow, NONE).seconds[0]
    assert found == pytest.approx(wire / far, rel=1e-4)
    # Sixteen groups side by side all leave it at once.
    crossing = group_shape([2], [16], 4)
    pair = [float(collective_seconds(Collective.ALL_GATHER, 1e9, crossing, c, NONE).seconds[0])
            for c in (fast, slow)]  # fmt: skip
    assert pair[1] > 3 * pair[0]


def test_groups_that_cross_the_same_adapter_share_it() -> None:
    cluster = _cluster(gpus=4, nodes=4, nics=2, leaf=2)
    first, second = (shared_links(cluster, r) for r in ((0, 4), (1, 5)))
    assert {x.name for x in first} == {"nic:0", "nic:2"} == {x.name for x in second}
    assert first[0].bytes_per_s == pytest.approx(80e9)
    assert {x.name for x in shared_links(cluster, (0, 1))} == {"port:0", "port:1"}
    over = {x.name: x.bytes_per_s for x in shared_links(cluster, (0, 8))}
    assert set(over) == {"nic:0", "nic:4", "uplink:0", "uplink:1"}
    assert over["uplink:0"] == pytest.approx(2 * 4 * 40e9)
    slow = shared_links(_cluster(gpus=4, nodes=4, leaf=2, over=4.0), (0, 8))
    assert {x.name: x.bytes_per_s for x in slow}["uplink:0"] == pytest.approx(80e9)
    assert shared_links(cluster, (3,)) == ()
    with pytest.raises(InputError, match="no such rank"):
        shared_links(cluster, (0, 99))


@pytest.mark.parametrize("name", node_type_names())
def test_levels_of_every_node_type_are_positive(name: str) -> None:
    found = levels(cluster_of(name, 256))
    assert found.near_bytes_per_s > 0
    assert found.far_bytes_per_s > 0
    assert found.far_latency_s > 0


def test_too_large_a_graph_is_refused() -> None:
    with pytest.raises(InputError, match="too many"):
        topology(cluster_of("hgx_h100", 200_000))


@pytest.mark.parametrize("field", ["link", "network"])
def test_a_link_without_bandwidth_is_refused(field: str) -> None:
    data = cluster_of("hgx_h100", 16).to_data()
    (data["node"]["link"] if field == "link" else data["network"])["bandwidth"] = "0 B/s"
    with pytest.raises(ValueError, match="bandwidth must be from"):
        ClusterSpec.model_validate(data)
