"""Uneven experts: tails against brute force, copies, and how few moves balance any load."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.simulator.training.routing import (
    balancing_moves,
    busiest_over_mean,
    power_law,
    redundant_slots,
    split_hottest,
)
from flopwright.spec.load import load_model
from flopwright.spec.model import Moe
from flopwright.spec.workload import ExpertLoad

MOE = Moe(num_experts=64, top_k=8, expert_intermediate_size=16)
RANKS = np.array([1.0, 2.0, 8.0, 64.0])


def test_even_experts_have_no_tail() -> None:
    for load in (ExpertLoad(), ExpertLoad(kind="power_law", exponent=0.0)):
        np.testing.assert_allclose(busiest_over_mean(MOE, load, RANKS), 1.0)
    assert (busiest_over_mean(None, ExpertLoad(kind="power_law"), RANKS) == 1).all()


def test_one_expert_a_rank_waits_for_the_hottest_expert() -> None:
    """The tail is then the largest share times the experts, whatever the placement."""
    load = ExpertLoad(kind="power_law", exponent=0.7)
    tail = busiest_over_mean(MOE, load, RANKS)
    weights = np.arange(1, 65) ** -0.7
    assert tail[-1] == pytest.approx(64 / weights.sum())
    assert tail[0] == 1.0
    assert np.all(np.diff(tail) > 0)  # fewer experts a rank even out less


def test_the_tail_is_the_mean_over_placements() -> None:
    load = ExpertLoad(kind="power_law", exponent=1.0)
    (tail,) = busiest_over_mean(MOE, load, np.array([8.0]))
    rng = np.random.default_rng(99)
    shares = power_law(64, 1.0)
    drawn = [rng.permutation(shares).reshape(8, 8).sum(axis=1).max() * 8 for _ in range(4000)]
    assert tail == pytest.approx(np.mean(drawn), rel=0.05)


def test_capacity_takes_the_same_from_every_expert() -> None:
    load = ExpertLoad(kind="capacity", capacity_factor=1.5)
    np.testing.assert_array_equal(busiest_over_mean(MOE, load, RANKS), 1.5)


@given(st.integers(1, 40), st.floats(0, 3))
def test_copies_keep_the_load_and_lower_the_hottest(copies: int, exponent: float) -> None:
    shares = power_law(32, exponent)
    slots = split_hottest(shares, copies)
    assert len(slots) == 32 + copies
    assert slots.sum() == pytest.approx(1.0)
    assert slots.max() <= shares.max() + 1e-12
    # No slot could be split further for a lower maximum: greedy is optimal here.
    assert slots.max() <= max(1.0 / (32 + copies) * 32, 1.0) * shares.max()


@settings(max_examples=200)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=24))
def test_any_load_is_balanced_with_one_donor_a_rank(loads: list[int]) -> None:
    """MoonEP: every rank ends with the mean, receiving from at most one other."""
    scaled = [load * len(loads) for load in loads]  # so that the mean is whole
    moves = balancing_moves(scaled)
    after = np.array(scaled)
    for source, target, rows in moves:
        assert rows > 0
        after[source] -= rows
        after[target] += rows
    assert (after == sum(loads)).all()
    targets = [target for _, target, _ in moves]
    assert len(targets) == len(set(targets))


@pytest.mark.parametrize(
    ("experts", "ranks", "worst", "enough"), [(384, 16, 23, 24), (8, 8, 1, 1)]
)
def test_redundant_slots_of_moonep(experts: int, ranks: int, worst: int, enough: int) -> None:
    """One donor a rank and E / R experts on the donor: E / R slots always suffice."""
    assert redundant_slots(experts, ranks) == (worst, enough)


def test_kimi_k2_on_sixteen_ranks_needs_no_more_than_its_local_experts() -> None:
    moe = load_model("kimi_k2").moe
    assert moe is not None
    worst, enough = redundant_slots(moe.num_experts, 16)
    assert worst <= enough == moe.num_experts // 16
