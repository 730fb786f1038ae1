"""Collectives: textbook ring formulas, two levels, measured curves, nonsense."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.ops import Collective
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.calibration.model import Calibration, CollectiveCurve
from flopwright.simulator.collectives.formulas import hierarchical_s, tree_s
from flopwright.simulator.collectives.net import net_of
from flopwright.simulator.collectives.times import collective_seconds
from flopwright.simulator.collectives.topology import group_shape
from flopwright.spec.load import load_cluster

H800 = load_cluster("2048_h800")
CPU = load_cluster("local_2cpu")
NONE = Calibration(id="none", created="", source="test")
A, B = 3e-6, 160e9  # NVLink of the cluster file
A_NET, B_NET = 8e-6, 50e9


def _seconds(
    kind: Collective,
    nbytes: float,
    size: int,
    stride: int = 1,
    calibration: Calibration = NONE,
    copies: int | None = None,
) -> float:
    group = group_shape([size], [stride], H800.node.gpus)
    return float(collective_seconds(kind, [nbytes], group, H800, calibration, copies).seconds[0])


@pytest.mark.parametrize("g", [2, 4, 8])
@pytest.mark.parametrize("n", [0.0, 1e3, 1e9])
def test_rings_inside_a_node(g: int, n: float) -> None:
    """Thakur, Rabenseifner, Gropp (2005), without the reduction's arithmetic."""
    half = (g - 1) * A + (g - 1) / g * n / B
    assert _seconds(Collective.ALL_GATHER, n, g) == pytest.approx(half)
    assert _seconds(Collective.REDUCE_SCATTER, n, g) == pytest.approx(half)
    assert _seconds(Collective.ALL_REDUCE, n, g) == pytest.approx(2 * half)
    assert _seconds(Collective.BROADCAST, n, g) == pytest.approx((g - 1) * A + n / B)
    assert _seconds(Collective.ALL_TO_ALL, n, g) == pytest.approx((g - 1) * A + n / B)
    assert _seconds(Collective.SEND_RECV, n, 2) == pytest.approx(A + n / B)


def test_a_ring_over_nodes_is_paced_by_its_slowest_link() -> None:
    """32 ranks on four nodes: 28 hops on NVLink and 3 between nodes, eight adapters a node."""
    n, wire = 1e9, 1e9 * 31 / 32
    expected = 28 * A + 3 * A_NET + max(wire / B, wire / 8 / B_NET)
    assert _seconds(Collective.ALL_GATHER, n, 32) == pytest.approx(expected)
    assert _seconds(Collective.REDUCE_SCATTER, n, 32) == pytest.approx(expected)


@pytest.mark.parametrize("n", [1e3, 1e6, 1e9])
def test_an_all_reduce_over_nodes_takes_the_fastest_algorithm(n: float) -> None:
    """NCCL's: ring, or double binary tree (Sanders, Speck, Traeff 2009)."""
    wire = 2 * n * 31 / 32
    ring = 2 * (28 * A + 3 * A_NET) + max(wire / B, wire / 8 / B_NET)
    tree = 2 * (2 * A_NET + 7 * A) + max(2 * n / B, 2 * n / 8 / B_NET)
    assert _seconds(Collective.ALL_REDUCE, n, 32) == pytest.approx(min(ring, tree))


def test_an_all_reduce_in_three_steps() -> None:
    """Scatter in the node, all-reduce across for each local rank, gather: its closed form."""
    n = np.array([1e9])
    steps = 2 * (7 * A + n * 7 / 8 / B) + 2 * 3 * (A_NET + n / 8 / 4 / B_NET)
    assert hierarchical_s(n, group_shape([32], [1], 8), net_of(H800)) == pytest.approx(steps)


def test_two_nodes_overstate_a_network() -> None:
    """Of two nodes each is root of one of the trees: half the bytes of any further node."""
    tree = [float(tree_s(np.array([8e12]), group_shape([g], [8], 8), net_of(H800))[0])
            for g in (2, 4)]  # fmt: skip
    assert tree[1] == pytest.approx(2 * tree[0], rel=1e-3)


def test_ranks_that_stand_a_node_apart_only_use_the_network() -> None:
    expected = 3 * (A_NET + 1e9 / 4 / B_NET)
    assert _seconds(Collective.ALL_GATHER, 1e9, 4, stride=8) == pytest.approx(expected)


def test_an_exchange_over_two_nodes_is_paced_by_its_slower_part() -> None:
    n = 15e9  # a fifteenth to each of the others: 7 on this node, 8 on the other
    near, far = 7 * A + 7e9 / B, A_NET + 8e9 / B_NET
    assert _seconds(Collective.ALL_TO_ALL, n, 16) == pytest.approx(max(near, far))


def test_a_token_crosses_to_a_node_once() -> None:
    """Eight experts drawn from two nodes: 2 (1 - 2^-8) nodes a token, half of them away."""
    rows = 1e9
    leaving = 8 * rows * 15 / 16
    far = A_NET + rows * 2 * (1 - 0.5**8) / 2 / B_NET
    near = 7 * A + rows * 16 * (1 - (15 / 16) ** 8) * 7 / 8 / B
    found = _seconds(Collective.ALL_TO_ALL, leaving, 16, copies=8)
    assert found == pytest.approx(max(near, far))
    assert found < _seconds(Collective.ALL_TO_ALL, leaving, 16)
    assert _seconds(Collective.ALL_TO_ALL, leaving, 16, copies=1) == pytest.approx(
        _seconds(Collective.ALL_TO_ALL, leaving, 16), rel=1e-9
    )


def test_node_limited_routing_spares_the_network() -> None:
    """Eight experts on at most 4 of 8 nodes: 4 (1 - (3/4)^8) nodes a token, 7/8 of them away."""
    rows, g = 1e9, 64
    group = group_shape([g], [1], 8)
    leaving = 8 * rows * 63 / 64
    kwargs = {"copies": 8, "node_limit": 4}
    found = collective_seconds(Collective.ALL_TO_ALL, [leaving], group, H800, NONE, **kwargs)
    far = 7 * A_NET + rows * 4 * (1 - 0.75**8) * 7 / 8 / B_NET
    near = 7 * A + rows * 32 * (1 - (31 / 32) ** 8) * 7 / 8 / B
    assert found.seconds[0] == pytest.approx(max(near, far))
    assert found.seconds[0] < _seconds(Collective.ALL_TO_ALL, leaving, g, copies=8)


def test_the_busiest_rank_keeps_the_others_waiting() -> None:
    group = group_shape([8], [1], 8)
    kind = Collective.ALL_TO_ALL
    even, skewed = (
        float(collective_seconds(kind, [8e9], group, H800, NONE, skew=x).seconds[0])
        for x in (1.0, 1.5)
    )
    assert skewed - 7 * A == pytest.approx(1.5 * (even - 7 * A))
    with pytest.raises(InputError, match="at least 1"):
        collective_seconds(Collective.ALL_TO_ALL, [8e9], group, H800, NONE, skew=0.5)


@pytest.mark.parametrize("kind", list(Collective))
def test_a_group_of_one_moves_nothing(kind: Collective) -> None:
    assert _seconds(kind, 1e9, 1) == 0.0


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(list(Collective)),
    n=st.floats(0, 1e12),
    more=st.floats(1.0, 10.0),
    g=st.sampled_from([2, 4, 8, 16, 64, 256]),
    stride=st.sampled_from([1, 2, 8, 16]),
)
def test_more_bytes_never_take_less(
    kind: Collective, n: float, more: float, g: int, stride: int
) -> None:
    small, large = _seconds(kind, n, g, stride), _seconds(kind, n * more, g, stride)
    assert 0 < small <= large
    assert np.isfinite(large)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_nonsense_is_refused(bad: float) -> None:
    with pytest.raises(InputError, match="finite"):
        _seconds(Collective.ALL_REDUCE, bad, 8)


@pytest.mark.parametrize(
    "plan", [ParallelPlan(tp=2, dp_shard=8, ep=4, pp=2), ParallelPlan(tp=4, cp=2, dp_shard=4)]
)
@pytest.mark.parametrize("gpus", [4, 8])
def test_layouts_are_those_of_the_mesh(plan: ParallelPlan, gpus: int) -> None:
    """Counts the ranks of each group on the nodes that plan/mesh.py puts them on."""
    strides = {
        "tp": (plan.tp, 1),
        "cp": (plan.cp, plan.tp),
        "ep": (plan.ep, 1),
        "edp": (plan.dp * plan.cp * plan.tp // plan.ep, plan.ep),
    }
    for name, (size, stride) in strides.items():
        group = group_shape([size], [stride], gpus)
        for ranks in Mesh(plan).groups(name):
            nodes = np.bincount([r // gpus for r in ranks])
            assert nodes.max() == group.local[0]
            assert (nodes > 0).sum() == group.nodes[0]


def _curve(collective: str, ranks: int, alpha_s: float, link: str = "loopback") -> CollectiveCurve:
    return CollectiveCurve(
        collective=collective, link=link, ranks=ranks, alpha_s=alpha_s, bytes_per_s=1e9
    )


def test_measured_curves_replace_formulas() -> None:
    calibration = Calibration(
        id="c", created="", source="test",
        collectives=(_curve("all_reduce", 2, 1e-3), _curve("all_reduce", 4, 5e-3)),
    )  # fmt: skip
    group = group_shape([2, 4, 1], [1, 1, 1], 4)
    found = collective_seconds(Collective.ALL_REDUCE, 1e6, group, CPU, calibration)
    assert found.seconds == pytest.approx([2e-3, 6e-3, 0.0])
    assert found.assumptions == ()


def test_what_was_not_measured_is_named() -> None:
    calibration = Calibration(
        id="c", created="", source="test", collectives=(_curve("all_reduce", 2, 1e-3),)
    )
    group = group_shape([4], [1], 4)
    found = collective_seconds(Collective.REDUCE_SCATTER, 1e6, group, CPU, calibration)
    assert found.seconds == pytest.approx([2e-3])
    assert "reduce_scatter is priced by the measured all_reduce" in found.assumptions[0]
    assert "between 4 ranks is priced as between 2" in found.assumptions[0]


def test_each_level_takes_the_curves_of_its_own_link() -> None:
    """A curve of the network does not stand in for one of the node, nor the other way round."""
    both = Calibration(
        id="c", created="", source="test",
        collectives=(
            _curve("all_reduce", 8, 1.0, "nvlink"), _curve("all_gather", 32, 2.0, "roce_400g"),
        ),
    )  # fmt: skip
    group = group_shape([8, 32], [1, 1], H800.node.gpus)
    found = collective_seconds(Collective.ALL_REDUCE, 0.0, group, H800, both)
    assert found.seconds == pytest.approx([1.0, 2.0])
    assert found.assumptions == ("all_reduce is priced by the measured all_gather",)


def test_a_link_that_was_not_measured_is_named() -> None:
    group = group_shape([16], [1], H800.node.gpus)
    curves = Calibration(
        id="c", created="", source="test", collectives=(_curve("all_gather", 8, 1.0, "nvlink"),)
    )
    found = collective_seconds(Collective.ALL_GATHER, 0.0, group, H800, curves)
    assert found.assumptions == ("roce_400g was not measured: formulas price it",)


def test_a_curve_of_one_link_does_not_price_another() -> None:
    inside = Calibration(
        id="c", created="", source="test", collectives=(_curve("all_gather", 8, 1.0, "nvlink"),)
    )
    assert _seconds(Collective.ALL_GATHER, 0.0, 8, 1, inside) == pytest.approx(1.0)
    assert _seconds(Collective.ALL_GATHER, 0.0, 16, 1, inside) < 1e-3
