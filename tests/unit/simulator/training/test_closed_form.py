"""Bubbles in closed form, and the bound that no replay undercuts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.training.candidates import SCHEDULES
from flopwright.simulator.training.closed_form import stage_end_seconds
from flopwright.simulator.training.program import program_of
from flopwright.simulator.training.replay import Durations, replay


def _replayed(plan: ParallelPlan, m: int, f: np.ndarray, b: np.ndarray, hop: np.ndarray) -> float:
    zero = np.zeros(plan.pp)
    durations = Durations(forward_s=f, backward_s=b, send_s=hop, reduce_s=zero, step_s=zero)
    return float(replay(program_of(plan, m), durations).step_time_s)


def _bound(plan: ParallelPlan, m: int, f: np.ndarray, b: np.ndarray, hop: np.ndarray) -> float:
    ends = stage_end_seconds(
        SCHEDULES.index(plan.schedule),
        f[:, None],
        b[:, None],
        hop[:, None],
        np.array([m]),
        plan.pp,
    )
    return float(ends.max())


@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("m", [8, 11, 16])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bubble_is_pp_minus_1_forwards_and_backwards(pp: int, m: int, schedule: str) -> None:
    """arXiv 2104.04473, 2.2.1."""
    plan = ParallelPlan(pp=pp, schedule=schedule)
    f, b, hop = np.full(pp, 1.0), np.full(pp, 2.5), np.zeros(pp)
    expected = m * 3.5 + (pp - 1) * 3.5
    assert _replayed(plan, m, f, b, hop) == pytest.approx(expected, abs=1e-9)
    assert _bound(plan, m, f, b, hop) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("vpp", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_interleaving_divides_the_bubble_by_vpp(pp: int, vpp: int, rounds: int) -> None:
    """arXiv 2104.04473, 2.2.2: bubble share (pp - 1) / (vpp * m) of the ideal time."""
    plan = ParallelPlan(pp=pp, vpp=vpp, schedule="interleaved_1f1b")
    m = rounds * pp
    f, b, hop = np.full(pp * vpp, 1.0 / vpp), np.full(pp * vpp, 2.5 / vpp), np.zeros(pp * vpp)
    expected = m * 3.5 * (1 + (pp - 1) / (vpp * m))
    assert _replayed(plan, m, f, b, hop) == pytest.approx(expected, abs=1e-9)
    assert _bound(plan, m, f, b, hop) == pytest.approx(expected, abs=1e-9)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple:
    """Draws (plan, m, f, b, hop) with stages up to 30 % apart."""
    schedule = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.integers(1, 8))
    vpp = draw(st.integers(2, 3)) if schedule == "interleaved_1f1b" else 1
    m = draw(st.integers(1, 6)) * pp if vpp > 1 else draw(st.integers(1, 32))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = pp * vpp
    f = rng.uniform(0.85, 1.15, n)
    hop = draw(st.sampled_from([0.0, 0.02, 0.3])) * rng.uniform(0.5, 1.5, n)
    hop[-1] = 0.0
    return ParallelPlan(pp=pp, vpp=vpp, schedule=schedule), m, f, 2 * f, hop * (pp > 1)


@settings(max_examples=300, deadline=None)
@given(pipelines())
def test_the_closed_form_is_a_bound_and_a_close_one(case: tuple) -> None:
    plan, m, f, b, hop = case
    exact, bound = _replayed(plan, m, f, b, hop), _bound(plan, m, f, b, hop)
    assert bound <= exact * (1 + 1e-12)
    assert bound >= exact / 1.15  # measured on 7,200 draws: median 1.000, worst 1.103
    if plan.schedule == "gpipe":
        assert bound == pytest.approx(exact, rel=1e-12)


def test_hops_slow_the_steady_state_by_the_round_trip() -> None:
    """Two equal stages lose one hop a micro-batch: period (2 (F + B) + 2 c) / 2."""
    plan = ParallelPlan(pp=2)
    f, b, hop = np.ones(2), 2 * np.ones(2), np.array([0.5, 0.0])
    slope = _replayed(plan, 64, f, b, hop) - _replayed(plan, 62, f, b, hop)
    assert slope == pytest.approx(2 * (3 + 0.5), abs=1e-9)
    bound = _bound(plan, 64, f, b, hop) - _bound(plan, 62, f, b, hop)
    assert bound == pytest.approx(slope, abs=1e-9)
