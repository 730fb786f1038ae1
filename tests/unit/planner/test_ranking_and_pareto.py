"""The order is exact, deterministic and says who fits; the front is what brute force finds."""

import numpy as np
import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.nearest import describe, nearest_infeasible
from flopwright.planner.pareto import pareto_front
from flopwright.planner.ranking import (
    Priced,
    best_of_each_layout,
    comfortable,
    headroom,
    layout_ids,
    objective_value,
    order,
)
from flopwright.planner.space import legal_candidates
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.training.candidates import Candidates
from flopwright.spec.load import load_scenario
from flopwright.spec.scenario import Scenario

K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
PRIOR = default_calibration(K2.cluster.node.gpu)
HBM = K2.cluster.node.gpu.hbm_bytes


def _priced(seed: int = 0, scenario: Scenario = K2) -> Priced:
    """Random prices with many exact ties over a part of the real space."""
    candidates = legal_candidates(scenario, {"tp": 1, "ep": 16})
    rng = np.random.default_rng(seed)
    n = len(candidates)
    times = rng.choice([10.0, 11.0, 12.0, 13.5], n)
    peaks = rng.choice([0.5, 0.93, 0.97, 1.2], n) * HBM
    return Priced(
        candidates=candidates,
        step_time_s=times,
        peak_bytes=peaks,
        peak_stage=rng.integers(0, 2, n),
        fits=peaks <= HBM,
    )


def test_order_is_sorted_by_tier_then_time() -> None:
    priced = _priced()
    ordered = order(priced, K2)
    assert sorted(ordered) == list(range(len(priced.candidates)))
    cosy = comfortable(priced, K2)[ordered]
    fits = priced.fits[ordered]
    tier = np.where(cosy, 0, np.where(fits, 1, 2))
    assert (np.diff(tier) >= 0).all()
    for t in range(3):
        assert (np.diff(priced.step_time_s[ordered][tier == t]) >= 0).all()


def test_order_does_not_depend_on_the_input_order() -> None:
    priced = _priced()
    shuffle = np.random.default_rng(3).permutation(len(priced.candidates))
    mixed = Priced(
        candidates=priced.candidates.take(shuffle),
        step_time_s=priced.step_time_s[shuffle],
        peak_bytes=priced.peak_bytes[shuffle],
        peak_stage=priced.peak_stage[shuffle],
        fits=priced.fits[shuffle],
    )
    np.testing.assert_array_equal(shuffle[order(mixed, K2)], order(priced, K2))


def test_ties_go_to_the_plan_with_fewer_switches() -> None:
    plans = [
        ParallelPlan(pp=16, ep=16, dp_shard=128, zero_stage=1, optimizer_offload=on)
        for on in (True, False)
    ]
    priced = Priced(
        candidates=Candidates.from_plans(plans),
        step_time_s=np.array([10.0, 10.0 * (1 + 1e-13)]),  # float noise, not a difference
        peak_bytes=np.array([0.3, 0.5]) * HBM,
        peak_stage=np.zeros(2, np.int64),
        fits=np.ones(2, bool),
    )
    assert list(order(priced, K2)) == [1, 0]


def test_best_of_each_layout_is_the_first_of_its_group() -> None:
    priced = _priced(1)
    ordered, ids = order(priced, K2), layout_ids(priced.candidates)
    expected, seen = [], set()
    for i in ordered:
        if ids[i] not in seen:
            seen.add(ids[i])
            expected.append(i)
    np.testing.assert_array_equal(best_of_each_layout(ordered, ids), expected)


def test_cost_counts_gpu_seconds() -> None:
    cheap = K2.model_copy(update={"objective": "cost"})
    priced = _priced(0, cheap)
    value = objective_value(priced, cheap)
    np.testing.assert_allclose(value, priced.step_time_s * priced.candidates.world_size)
    assert len(np.unique(priced.candidates.world_size)) > 1


def test_headroom_is_the_share_of_memory_left() -> None:
    priced = _priced()
    np.testing.assert_allclose(headroom(priced, K2), 1 - priced.peak_bytes / HBM)
    assert (comfortable(priced, K2) == (priced.peak_bytes < 0.95 * HBM)).all()


@pytest.mark.parametrize("seed", range(5))
def test_pareto_front_equals_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = rng.integers(0, 8, (200, 3)).astype(float)  # small integers: many equal points
    front = pareto_front(*points.T)

    def dominated(i: int) -> bool:
        better = (points <= points[i]).all(axis=1) & (points < points[i]).any(axis=1)
        return bool(better.any())

    expected = {tuple(points[i]) for i in range(len(points)) if not dominated(i)}
    found = [tuple(points[i]) for i in front]
    assert set(found) == expected
    assert len(found) == len(set(found))
    assert found == sorted(found)


def test_infeasible_neighbours_are_faster_and_lack_memory() -> None:
    priced = _priced()
    priced.step_time_s[~priced.fits] = 8.0
    found = nearest_infeasible(priced, K2, 5)
    assert len(found) == 5
    assert not priced.fits[found].any()
    ids = layout_ids(priced.candidates)[found]
    assert len(set(ids)) == 5
    priced.peak_stage[:] = 0  # some have no other
    text = describe(priced, int(found[0]), 8.0, K2, PRIOR)
    assert text.missing_bytes == int(priced.peak_bytes[found[0]]) - HBM
    (violation,) = text.violations
    assert violation.limit == "80 GiB"
    assert "16 GiB more than it has" in violation.rule
    assert "fits at" in violation.nearest_fix


def test_where_nothing_fits_the_nearest_come_first() -> None:
    priced = _priced()
    rng = np.random.default_rng(4)
    full = Priced(
        candidates=priced.candidates,
        step_time_s=priced.step_time_s,
        peak_bytes=rng.uniform(1.01, 3.0, len(priced.candidates)) * HBM,
        peak_stage=priced.peak_stage,
        fits=np.zeros(len(priced.candidates), bool),
    )
    found = nearest_infeasible(full, K2, 4)
    assert full.peak_bytes[found[0]] == full.peak_bytes.min()
    assert (np.diff(full.peak_bytes[found]) >= 0).all()
    assert describe(full, int(found[0]), 8.0, K2, PRIOR).violations[0].nearest_fix == ""


def test_a_fix_changes_as_little_as_possible() -> None:
    plans = [
        ParallelPlan(pp=16, ep=16, dp_shard=128, zero_stage=1),
        ParallelPlan(pp=16, ep=16, dp_shard=128, zero_stage=1, recompute="full"),
        ParallelPlan(pp=8, ep=16, dp_shard=256, zero_stage=1, recompute="full"),
    ]
    priced = Priced(
        candidates=Candidates.from_plans(plans),
        step_time_s=np.array([9.0, 12.0, 10.0]),
        peak_bytes=np.array([1.1, 0.5, 0.6]) * HBM,
        peak_stage=np.array([3, 0, 0]),
        fits=np.array([False, True, True]),
    )
    (violation,) = describe(priced, 0, 9.0, K2, PRIOR).violations
    assert violation.nearest_fix == "recompute full: fits at 12 s a step"
    assert "stage 3" in violation.rule


def test_lacking_host_memory_is_said_as_such() -> None:
    priced = Priced(
        candidates=Candidates.from_plans([ParallelPlan(pp=16, dp_shard=128)]),
        step_time_s=np.array([9.0]),
        peak_bytes=np.array([0.5]) * HBM,
        peak_stage=np.array([0]),
        fits=np.array([False]),
    )
    (violation,) = describe(priced, 0, 9.0, K2, PRIOR).violations
    assert violation.field == "host_memory"
