"""Bubbles in closed form, and the bound that no replay undercuts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import COMPUTE_KINDS
from flopwright.plan.schedules.placement import (
    CHUNKS_PER_STAGE,
    chunks_of_stage,
    fewest_microbatches,
    in_rounds,
    stage_of_chunk,
)
from flopwright.simulator.training.candidates import SCHEDULES
from flopwright.simulator.training.closed_form import stage_end_seconds
from flopwright.simulator.training.closed_form_bubbles import (
    bubble_seconds,
    dualpipe_idle_seconds,
    equal_chunks_seconds,
)
from flopwright.simulator.training.closed_form_lists import PERIODS, list_shape
from flopwright.simulator.training.durations import Durations, pair_seconds
from flopwright.simulator.training.program import program_of
from flopwright.simulator.training.replay import replay

Seconds = np.ndarray


def _replayed(
    plan: ParallelPlan, m: int, f: Seconds, b: Seconds, hop: Seconds, w: Seconds | None = None
) -> float:
    zero = np.zeros(plan.pp)
    durations = Durations(
        forward_s=f, backward_s=b, send_s=hop, reduce_s=zero, step_s=zero, weight_s=w
    )
    return float(replay(program_of(plan, m), durations).step_time_s)


def _bound(
    plan: ParallelPlan, m: int, f: Seconds, b: Seconds, hop: Seconds, w: Seconds | None = None
) -> float:
    ends = stage_end_seconds(
        SCHEDULES.index(plan.schedule),
        f[:, None],
        b[:, None],
        hop[:, None],
        np.array([m]),
        plan.pp,
        None if w is None else w[:, None],
    )
    return float(ends.max())


def _equal(plan: ParallelPlan, m: int, seconds: tuple[float, float, float]) -> tuple[float, float]:
    """Returns (replay, bound) of equal chunks with free hops."""
    f, i, w = (np.full(plan.num_chunks, x) for x in seconds)
    case = (plan, m, f, i + w, np.zeros(plan.num_chunks), w)
    return _replayed(*case), _bound(*case)


@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("m", [8, 11, 16])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bubble_is_pp_minus_1_forwards_and_backwards(pp: int, m: int, schedule: str) -> None:
    """arXiv 2104.04473, 2.2.1."""
    plan = ParallelPlan(pp=pp, schedule=schedule)
    expected = m * 3.5 + (pp - 1) * 3.5
    assert _equal(plan, m, (1.0, 1.5, 1.0)) == pytest.approx((expected, expected), abs=1e-9)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("vpp", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_1f1b_overlap"])
def test_interleaving_divides_the_bubble_by_vpp(
    schedule: str, pp: int, vpp: int, rounds: int
) -> None:
    """arXiv 2104.04473, 2.2.2: bubble share (pp - 1) / (vpp * m) of the ideal time."""
    plan = ParallelPlan(pp=pp, vpp=vpp, schedule=schedule)
    m = rounds * pp
    expected = m * 3.5 * (1 + (pp - 1) / (vpp * m))
    found = _equal(plan, m, (1.0 / vpp, 1.5 / vpp, 1.0 / vpp))
    assert found == pytest.approx((expected, expected), abs=1e-9)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize(("schedule", "vpp"), [("zb_h1", 1), ("zb_h1", 3), ("zb_v", 2)])
def test_zero_bubble_schedules_have_the_papers_bubbles(
    schedule: str, vpp: int, pp: int, rounds: int
) -> None:
    """arXiv 2401.10241: ZB-H1 (p - 1) (F + I - W); ZB-V nothing but the start at F = I = W."""
    plan = ParallelPlan(pp=pp, vpp=vpp, schedule=schedule)
    m = 2 * rounds * pp
    if schedule == "zb_v":
        expected = 6.0 * m + (pp - 1)
        assert _equal(plan, m, (1.0, 1.0, 1.0)) == pytest.approx((expected, expected), abs=1e-9)
        return
    for seconds in ((1.0, 1.0, 1.0), (2.0, 2.5, 1.5), (1.0, 3.0, 1.0)):
        f, i, w = seconds
        expected = vpp * m * sum(seconds) + (pp - 1) * (f + i - w)
        assert _equal(plan, m, seconds) == pytest.approx((expected, expected), abs=1e-9)


def test_zb_h1_cuts_1f1bs_bubble_to_a_third() -> None:
    """arXiv 2401.10241, 2.1, at F = I = W."""
    third = bubble_seconds("zb_h1", 8, 16, (1.0, 1.0, 1.0))
    assert third == bubble_seconds("1f1b", 8, 16, (1.0, 1.0, 1.0)) / 3  # type: ignore[operator]


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 2, 9])
def test_dualpipe_v_has_the_bubble_of_its_readme(pp: int, extra: int) -> None:
    """deepseek-ai/DualPipe: (p - 1) (F&B + B - 3 W), here with F&B = F + B and F = I."""
    plan = ParallelPlan(pp=pp, vpp=2, schedule="dualpipe_v")
    m = 2 * pp + extra
    for f, i, w in ((1.0, 1.0, 1.0), (2.0, 2.0, 1.0)):
        expected = 2 * m * (f + i + w) + (pp - 1) * ((f + i + w) + (i + w) - 3 * w)
        assert _equal(plan, m, (f, i, w)) == pytest.approx((expected, expected), abs=1e-9)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("hidden", [0.0, 0.4, 1.0])
def test_pairs_that_hide_communication_shorten_dualpipe_vs_bubble(pp: int, hidden: float) -> None:
    """The last stage's idle time, with F&B below F + B, is the README's too."""
    plan, m, chunks = ParallelPlan(pp=pp, vpp=2, schedule="dualpipe_v"), 4 * pp, 2 * pp
    one, zero = np.ones(chunks), np.zeros(pp)
    durations = Durations(
        forward_s=one, backward_s=2 * one, send_s=0 * one, reduce_s=zero, step_s=zero,
        weight_s=one, forward_exchange_s=hidden / 2 * one, backward_exchange_s=hidden / 2 * one,
    )  # fmt: skip
    timeline = replay(program_of(plan, m), durations)
    program = program_of(plan, m)
    own = [
        (e.action, float(timeline.start_s[i]), float(timeline.end_s[i]))
        for i, e in enumerate(program.entries)
        if e.stage == pp - 1 and e.action.kind in COMPUTE_KINDS
    ]
    pair_s = 3.0 - hidden
    pairs = sum(a.overlaps for a, _, _ in own) // 2
    busy = sum(e - s for a, s, e in own if not a.overlaps) + pairs * pair_s
    idle = max(e for _, _, e in own) - busy
    assert idle == pytest.approx(dualpipe_idle_seconds(pp, 1.0, pair_s), abs=1e-9)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[ParallelPlan, int]:
    """Draws (plan, micro-batches) of every schedule."""
    schedule = draw(st.sampled_from(SCHEDULES))
    least, most = CHUNKS_PER_STAGE[schedule]
    pp, vpp = draw(st.integers(1, 8)), draw(st.integers(least, most or 3))
    if in_rounds(schedule, vpp):
        m = pp * draw(st.integers(1, 6))
    else:
        m = draw(st.integers(fewest_microbatches(schedule, pp), 32))
    return ParallelPlan(pp=pp, vpp=vpp, schedule=schedule), m


@st.composite
def priced(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draws (plan, m, f, b, hop, w) with chunks up to 30 % apart."""
    plan, m = draw(pipelines())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = plan.num_chunks
    f, b = (rng.uniform(0.85, 1.15, n) for _ in range(2))
    b = 2 * (f if plan.schedule in {"gpipe", "1f1b", "interleaved_1f1b"} else b)
    hop = draw(st.sampled_from([0.0, 0.02, 0.3])) * rng.uniform(0.5, 1.5, n)
    for c in range(n):
        if c == n - 1 or stage_of_chunk(plan, c) == stage_of_chunk(plan, c + 1):
            hop[c] = 0.0
    return plan, m, f, b, hop, b * draw(st.sampled_from([0.3, 0.5, 0.6]))


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(priced())
def test_the_closed_form_is_a_bound_and_a_close_one(case: tuple[Any, ...]) -> None:
    exact, bound = _replayed(*case), _bound(*case)
    assert bound <= exact * (1 + 1e-12)
    assert bound >= exact / 1.15
    if case[0].schedule == "gpipe":
        assert bound == pytest.approx(exact, rel=1e-12)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(pipelines(), st.tuples(*[st.sampled_from([0.5, 1.0, 1.5, 2.0, 4.0])] * 3))
def test_bubble_formulas_equal_the_replay_where_they_hold(
    case: tuple[ParallelPlan, int], seconds: tuple[float, float, float]
) -> None:
    plan, m = case
    expected = equal_chunks_seconds(plan.schedule, plan.pp, plan.vpp, m, seconds)
    exact, bound = _equal(plan, m, seconds)
    assert bound <= exact + 1e-9
    if expected is not None:
        assert exact == pytest.approx(expected, abs=1e-9)
        assert bound == pytest.approx(expected, abs=1e-9)


def test_no_formula_is_given_outside_its_conditions() -> None:
    assert bubble_seconds("zb_v", 4, 6, (1.0, 1.0, 1.0)) is None
    assert bubble_seconds("zb_v", 4, 8, (2.0, 1.0, 1.0)) is None
    assert bubble_seconds("zb_h1", 4, 3, (1.0, 1.0, 1.0)) is None
    assert bubble_seconds("dualpipe_v", 4, 8, (1.0, 2.0, 1.0)) is None


@settings(max_examples=150, deadline=None)
@given(priced(), st.floats(0.0, 0.8), st.floats(0.0, 0.8))
def test_the_bound_holds_where_pairs_hide_exchanges(
    case: tuple[Any, ...], forward_share: float, backward_share: float
) -> None:
    plan, m, f, b, hop, w = case
    zero, exchange = np.zeros(plan.pp), (forward_share * f, backward_share * (b - w))
    durations = Durations(
        forward_s=f, backward_s=b, send_s=hop, reduce_s=zero, step_s=zero, weight_s=w,
        forward_exchange_s=exchange[0], backward_exchange_s=exchange[1],
    )  # fmt: skip
    exact = float(replay(program_of(plan, m), durations).step_time_s)
    saving = np.zeros((plan.pp, plan.vpp, plan.vpp, 1))
    for s in range(plan.pp):
        for i, c in enumerate(chunks_of_stage(plan, s)):
            for j, d in enumerate(chunks_of_stage(plan, s)):
                out, back = exchange[0][c], exchange[1][d]
                both = pair_seconds(f[c] - out, out, b[d] - back, back)
                saving[s, i, j] = f[c] + b[d] - both
    columns = (f[:, None], b[:, None], hop[:, None], np.array([m]), plan.pp, w[:, None])
    ends = stage_end_seconds(SCHEDULES.index(plan.schedule), *columns, saving)
    assert ends.max() <= exact * (1 + 1e-12)
    if hop.max() < 0.1:  # hops slow the steady state, which this bound does not follow
        assert ends.max() >= exact / 1.15


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v", "dualpipe_v", "interleaved_1f1b_overlap"])
@pytest.mark.parametrize("pp", [1, 2, 3, 5])
def test_more_microbatches_change_no_work_around_the_anchors(schedule: Any, pp: int) -> None:
    least, most = CHUNKS_PER_STAGE[schedule]
    for vpp in range(least, (most or 3) + 1):
        few, many = (list_shape(schedule, pp, vpp, k * pp) for k in (PERIODS, PERIODS + 3))
        for name in ("before", "behind", "first", "last", "between"):
            np.testing.assert_array_equal(getattr(few, name), getattr(many, name))
        np.testing.assert_allclose(many.pairs - few.pairs, 3 * pp * few.growth)


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_candidates_are_bounded_together_as_alone(case: tuple[ParallelPlan, int]) -> None:
    plan, m = case
    rng = np.random.default_rng(0)
    n, many = plan.num_chunks, np.array([m, m + 5 * plan.pp, m + 9 * plan.pp, m])
    f, b, hop = (rng.uniform(0.5, 1.5, (n, 4)) for _ in range(3))
    hop[-1] = 0.0
    index = SCHEDULES.index(plan.schedule)
    together = stage_end_seconds(index, f, b, hop, many, plan.pp, b / 2)
    for k in range(4):
        one = (x[:, [k]] for x in (f, b, hop))
        alone = stage_end_seconds(index, *one, many[[k]], plan.pp, b[:, [k]] / 2)
        np.testing.assert_allclose(together[:, [k]], alone, rtol=1e-12)


def test_hops_slow_the_steady_state_by_the_round_trip() -> None:
    """Two equal stages lose one hop a micro-batch: period (2 (F + B) + 2 c) / 2."""
    plan = ParallelPlan(pp=2)
    f, b, hop = np.ones(2), 2 * np.ones(2), np.array([0.5, 0.0])
    slope = _replayed(plan, 64, f, b, hop) - _replayed(plan, 62, f, b, hop)
    assert slope == pytest.approx(2 * (3 + 0.5), abs=1e-9)
    bound = _bound(plan, 64, f, b, hop) - _bound(plan, 62, f, b, hop)
    assert bound == pytest.approx(slope, abs=1e-9)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v", "dualpipe_v"])
def test_a_stage_alone_works_without_a_gap(schedule: Any) -> None:
    plan = ParallelPlan(vpp=CHUNKS_PER_STAGE[schedule][0], schedule=schedule)
    assert _equal(plan, 7, (1.0, 2.0, 4.0)) == pytest.approx((49.0 * plan.vpp,) * 2)
