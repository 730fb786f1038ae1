"""Fitted curves of links: where they come from, what they may not do, how well they hold."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.ops import Collective
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.collectives.curves import FOLDER, load_link
from flopwright.simulator.collectives.expert_exchange import node_limit_of, wire_bytes
from flopwright.simulator.collectives.formulas import all_reduce_algorithms
from flopwright.simulator.collectives.levels import levels
from flopwright.simulator.collectives.net import net_of
from flopwright.simulator.collectives.overlap import compute_slowdown
from flopwright.simulator.collectives.times import collective_seconds
from flopwright.simulator.collectives.topology import group_shape
from flopwright.simulator.hardware.nodes import cluster_of, node_type, node_type_names
from flopwright.spec.cluster import ClusterSpec

NONE = Calibration(id="none", created="", source="test")
FILES = sorted(FOLDER.glob("*.yaml"))
ROOT = Path(__file__).parents[4]


def _seconds(node: str, kind: Collective, n: float, g: int, stride: int = 1, **more: int) -> float:
    cluster = cluster_of(node, max(g * stride, 8))
    group = group_shape([g], [stride], cluster.node.domain_gpus)
    return float(collective_seconds(kind, [n], group, cluster, NONE, **more).seconds[0])


def _algorithm(node: str, n: float, g: int) -> str:
    cluster = cluster_of(node, max(g, 8))
    group = group_shape([g], [1], cluster.node.domain_gpus)
    every = all_reduce_algorithms(np.array([n]), group, net_of(cluster))
    return min(every, key=lambda name: float(every[name][0]))


def _numbers(node: object) -> int:
    if isinstance(node, dict):
        return sum(map(_numbers, node.values()))
    if isinstance(node, list):
        return sum(map(_numbers, node))
    return isinstance(node, (int, float))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_file_says_where_it_comes_from_and_rebuilds_no_table(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    header = " ".join(x.lstrip("# ") for x in text.splitlines() if x.startswith("#"))
    for word in ("Source:", "Apache-2.0", "changed: fitted"):
        assert word in header
    commit = header.split("commit ")[1][:40]
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert commit in notice
    assert "simulator/hardware/links" in notice
    assert _numbers(yaml.safe_load(text)) <= 200
    assert load_link(path.stem).name == path.stem


@pytest.mark.parametrize("name", node_type_names())
def test_every_curve_that_a_node_names_is_there(name: str) -> None:
    found = node_type(name)
    for link in (found.node.link, found.network):
        if link is not None and link.curve:
            assert load_link(link.curve).curves


def test_a_curve_that_is_not_there_is_refused() -> None:
    data = cluster_of("hgx_h100", 8).to_data()
    data["node"]["link"]["curve"] = "nvlink4_h10"
    cluster = ClusterSpec.model_validate(data)
    group = group_shape([8], [1], 8)
    with pytest.raises(InputError, match="did you mean 'nvlink4_h100'"):
        collective_seconds(Collective.ALL_REDUCE, [1e6], group, cluster, NONE)


@settings(max_examples=150, deadline=None)
@given(
    node=st.sampled_from(node_type_names()),
    kind=st.sampled_from(list(Collective)),
    n=st.floats(0, 1e13),
    more=st.floats(1.0, 100.0),
    g=st.integers(2, 2048),
    stride=st.sampled_from([1, 2, 4, 8, 16]),
    copies=st.sampled_from([None, 1, 8]),
)
def test_more_bytes_take_longer_and_no_link_is_outrun(
    node: str, kind: Collective, n: float, more: float, g: int, stride: int, copies: int | None
) -> None:
    """The floor is what must cross the slower level at the full bandwidth of its link."""
    cluster = cluster_of(node, g * stride)
    group = group_shape([g], [stride], cluster.node.domain_gpus)
    extra = {"copies": copies} if kind is Collective.ALL_TO_ALL else {}
    small, large = (
        float(collective_seconds(kind, [x], group, cluster, NONE, **extra).seconds[0])
        for x in (n, n * more)
    )
    assert np.isfinite(large)
    assert 0 < small <= large * (1 + 1e-12)
    assert small >= _floor_s(kind, n, g, group, cluster, copies) * (1 - 1e-9)


def _floor_s(kind, n, g, group, cluster, copies) -> float:  # type: ignore[no-untyped-def]
    on, local = levels(cluster), float(group.local[0])
    if kind is Collective.ALL_TO_ALL:
        near, far = (float(x[0]) for x in wire_bytes(np.array([n]), group, copies, None))
        return max(near / on.near_bytes_per_s, far / on.far_bytes_per_s if far else 0.0)
    share = {Collective.SEND_RECV: 1.0, Collective.BROADCAST: 1.0}.get(kind, (g - 1) / g)
    if not group.spans[0]:
        return share * n / on.near_bytes_per_s
    return share * n / (local * on.far_bytes_per_s)


def test_nccl_adds_up_in_the_switch_where_it_was_seen_to() -> None:
    """Published: above 4 GPUs of an H200 node and 5 of a B200 node, for all-reduce alone."""
    large = 8 * 2**30
    for node, first in (("hgx_h200", 5), ("hgx_b200", 6)):
        picked = [_algorithm(node, large, g) for g in range(2, 9)]
        assert picked == ["ring"] * (first - 2) + ["nvls"] * (9 - first)
    assert _algorithm("hgx_a100", large, 8) == "ring"
    assert _algorithm("hgx_h200", 16 * 2**30, 32) == "ring"
    assert _algorithm("hgx_h100", 2**20, 512) != "ring"


@settings(max_examples=100, deadline=None)
@given(
    node=st.sampled_from(["hgx_h200", "gb200_nvl72", "mi300x_8gpu", "grand_teton_h100"]),
    kind=st.sampled_from(list(Collective)),
    groups=st.lists(
        st.tuples(st.integers(1, 600), st.sampled_from([1, 4, 8, 64]), st.floats(0, 1e11)),
        min_size=1, max_size=6,
    ),
)  # fmt: skip
def test_many_candidates_cost_what_each_does_alone(
    node: str, kind: Collective, groups: list[tuple[int, int, float]]
) -> None:
    cluster = cluster_of(node, 8192)
    size, stride, n = (np.array(x, float) for x in zip(*groups, strict=True))
    together = collective_seconds(
        kind, n, group_shape(size, stride, cluster.node.domain_gpus), cluster, NONE
    ).seconds
    for i in range(len(n)):
        alone = group_shape(size[i : i + 1], stride[i : i + 1], cluster.node.domain_gpus)
        seconds = collective_seconds(kind, n[i : i + 1], alone, cluster, NONE).seconds[0]
        assert together[i] == pytest.approx(seconds, rel=1e-12)


def test_many_ranks_cost_latency_in_a_ring() -> None:
    """All-gather has no tree in NCCL: seconds of an empty one grow with the ranks."""
    few, many = (_seconds("hgx_h100", Collective.ALL_GATHER, 0.0, g) for g in (256, 2048))
    assert many > 6 * few
    assert many == pytest.approx(2047 * 1.5e-6 + 255 * 8e-6, rel=0.05)


@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_deepep_on_h800_as_published(call: str) -> None:
    """DeepEP V1, 4,096 tokens, hidden 7168, top 8 of 4 nodes: 153 / 158 GB/s in a node, and
    over 4 and 8 nodes 58 and 51, 57 and 50 GB/s of adapter, own node counted."""
    width = 1 + 4 / 128 if call == "dispatch" else 2
    published = {"dispatch": {8: 153, 32: 58, 64: 51}, "combine": {8: 158, 32: 57, 64: 50}}
    for g, rate in published[call].items():
        cluster, nodes = cluster_of("hgx_h800", g), g // 8
        group = group_shape([g], [1], 8)
        tokens = 4096 * 7168 * width
        leaving = tokens * 8 * (g - 1) / g
        found = collective_seconds(
            Collective.ALL_TO_ALL, [leaving], group, cluster, NONE, 8, call=call, node_limit=4
        ).seconds[0]
        near, far = wire_bytes(np.array([leaving]), group, 8, 4)
        counted = float(near[0]) if g == 8 else float(far[0]) * nodes / (nodes - 1)
        assert counted / found == pytest.approx(rate * 1e9, rel=0.12)


def test_expert_bytes_of_a_token_and_layer() -> None:
    """K2: eight copies of 7168 bf16 numbers are 114,688 bytes before any is spared."""
    sent = np.array([8 * 7168 * 2.0])
    assert sent[0] == 114_688
    group = group_shape([16], [1], 8)
    near, far = wire_bytes(sent * 15 / 16, group, None, None)
    assert near[0] + far[0] == pytest.approx(114_688 * 15 / 16)
    near, far = wire_bytes(sent * 15 / 16, group, 8, None)
    assert far[0] == pytest.approx(7168 * 2 * 2 * (1 - 0.5**8) / 2)


def test_expert_groups_limit_the_nodes() -> None:
    """DeepSeek-V3: 4 of 8 groups; two groups a node of four, half a group a node of sixteen."""
    nodes = np.array([1.0, 4.0, 8.0, 16.0])
    assert node_limit_of(8, 4, nodes).tolist() == [1, 4, 4, 8]
    assert node_limit_of(1, 1, nodes).tolist() == nodes.tolist()


def test_a_rack_of_72_exchanges_without_the_network() -> None:
    inside = _seconds("gb200_nvl72", Collective.ALL_TO_ALL, 1e9, 64, copies=8)
    outside = _seconds("hgx_b200", Collective.ALL_TO_ALL, 1e9, 64, copies=8)
    assert inside < outside / 3


def test_what_an_exchange_takes_from_compute() -> None:
    assert compute_slowdown(cluster_of("hgx_h100", 8), "moe_combine") == pytest.approx(132 / 112)
    assert compute_slowdown(cluster_of("hgx_h100", 8), "all_gather_ring") == 1.0
    assert compute_slowdown(cluster_of("gh200", 8), "moe_combine") == 1.0


TABLES = {"a100_sxm": "hgx_a100", "h100_sxm": "hgx_h100", "h200_sxm": "hgx_h200"}
TABLES |= {"b200_sxm": "hgx_b200", "b300_sxm": "hgx_b300"}
KINDS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "all_to_all": Collective.ALL_TO_ALL,
}


@pytest.mark.parametrize("gpu", TABLES)
def test_runs_with_bytes_as_elements_were_not_fitted_and_hold(
    gpu: str, measured_data: Path
) -> None:
    """The curves are fitted to the half-precision runs of these tables; these are int8."""
    pytest.importorskip("pyarrow")
    rows = pd.read_parquet(measured_data / "operators" / "collectives.parquet")
    rows = rows[(rows.gpu == gpu) & (rows.implementation == "nccl") & (rows.dtype == "int8")]
    assert len(rows) > 200
    errors = {}
    for op, each in rows.groupby("op"):
        # An exchange of the tables counts the part that a rank keeps.
        kept = (each.num_gpus - 1) / each.num_gpus if op == "all_to_all" else 1.0
        found = [
            _seconds(TABLES[gpu], KINDS[str(op)], n, g)
            for n, g in zip(each.bytes * kept, each.num_gpus, strict=True)
        ]
        errors[op] = float(np.median(np.abs(np.array(found) / each.latency_s - 1)))
    # Exchanges of up to 64 KiB take 7 or 16 us in these tables, from one size to the next.
    assert errors.pop("all_to_all") < 0.15
    assert max(errors.values()) < 0.1, errors


def test_published_all_reduces_that_were_not_fitted(measured_data: Path) -> None:
    """One node, from 8 MiB, where the benchmark's own loop is not seen any more, to 4 GiB:
    larger ones were fitted."""
    rows = pd.read_csv(measured_data / "validation" / "kernels_and_links.csv")
    rows = rows[rows.metric == "busbw"]
    size = rows["shape/size"].str.extract(r"(\d+) ?(B|KiB|MiB|GiB)$")
    scale = size[1].map({"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30})
    rows = rows.assign(n=size[0].astype(float) * scale)
    for prefix, node in (
        ("a100-8gpu-ar", "hgx_a100"), ("h200-8gpu-ar", "hgx_h200"), ("b200-1node-ar", "hgx_b200"),
    ):  # fmt: skip
        mine = rows[rows.id.str.startswith(prefix) & (rows.n >= 8 * 2**20) & (rows.n < 8 * 2**30)]
        assert len(mine) >= 10
        measured = 1.75 * mine.n / (mine.value.astype(float) * 1e9)
        found = np.array([_seconds(node, Collective.ALL_REDUCE, n, 8) for n in mine.n])
        error = np.abs(found / measured - 1)
        assert np.median(error) < 0.1, (node, error)
