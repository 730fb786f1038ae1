"""The regression alarm on series whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from flopwright.report import drift as drift_module
from flopwright.report.drift import Drift, drift_of, find_drifts, hardware_id
from flopwright.report.metrics import Fingerprint, Measurement, StepMetrics

Array = NDArray[np.float64]
REPEATS = 100
NOISE = 0.02
RUNS = 30


def series(seed: int, planted: Array | float = 0.0, *, noise: float = NOISE) -> Array:
    """Returns seconds of runs: noise around 2 s, slowed by `planted` (log)."""
    rng = np.random.default_rng(seed)
    return np.asarray(2.0 * np.exp(rng.normal(0, noise, RUNS) + planted))


def alarms(planted: Array | float, change: Callable[[Array, int], Array] | None = None) -> int:
    found = 0
    for seed in range(REPEATS):
        values = series(seed, planted)
        found += drift_of(values if change is None else change(values, seed)).alarm
    return found


def step_at(index: int, size: float = 0.08) -> Array:
    return np.where(np.arange(RUNS) >= index, math.log1p(size), 0.0)


def outliers(values: Array, seed: int) -> Array:
    """Makes one run in twenty late by 30 to 200 %."""
    rng = np.random.default_rng(1000 + seed)
    odd = rng.random(len(values)) < 0.05
    return np.where(odd, values * rng.uniform(1.3, 3.0, len(values)), values)


def test_two_percent_noise_raises_no_alarm_in_100_repeats() -> None:
    assert alarms(0.0) == 0


@pytest.mark.parametrize("index", [10, 15, 20])
def test_eight_percent_raises_the_alarm_in_100_of_100_repeats(index: int) -> None:
    assert alarms(step_at(index)) == REPEATS


def test_eight_percent_that_creep_over_the_series_raise_it_too() -> None:
    """Noise of 2 % hides the slope in few of them: t has a mean of 6.9 against a bound of 4.3."""
    assert alarms(np.linspace(0.0, math.log(1.08), RUNS)) >= 0.9 * REPEATS


def test_late_runs_neither_raise_the_alarm_nor_hide_a_slowdown() -> None:
    assert alarms(0.0, outliers) == 0
    assert alarms(step_at(15), outliers) >= 0.9 * REPEATS


@pytest.mark.parametrize("size", [1.3, 2.0, 10.0])
@pytest.mark.parametrize("place", [-1, -2, 12])
def test_one_odd_run_is_no_change_even_as_the_newest(size: float, place: int) -> None:
    for seed in range(20):
        values = series(seed)
        values[place] *= size
        assert not drift_of(values).alarm


@pytest.mark.slow
def test_the_rate_of_false_alarms_is_the_stated_one() -> None:
    """5 sigma above the stated rate, over noise of several sizes and lengths of series."""
    rng = np.random.default_rng(5)
    looks, stated, found = 1500, 0.02, 0
    for i in range(looks):
        noise, runs = (0.01, 0.03, 0.1)[i % 3], (8, 15, 25)[i // 3 % 3]
        drift = drift_of(np.exp(rng.normal(0, noise, runs)), false_alarm=stated, least=0.0)
        found += bool(drift.changes)
    assert found <= looks * stated + 5 * math.sqrt(looks * stated)


def test_a_faster_plan_is_a_change_and_no_alarm() -> None:
    drift = drift_of(series(3, step_at(15, -0.08)))
    assert not drift.alarm
    assert drift.since is None
    assert drift.changes[-1].shift == pytest.approx(-0.08, abs=0.02)
    assert "no slowdown now; last change -" in drift.text()


def test_a_slowdown_that_was_repaired_is_no_alarm_now() -> None:
    values = series(4, step_at(10, 0.2) - step_at(20, 0.2))
    drift = drift_of(values)
    assert [c.kind for c in drift.changes] == ["step", "step"]
    assert not drift.alarm


def test_two_slowdowns_in_a_row_count_together_from_the_first() -> None:
    drift = drift_of(series(5, step_at(10, 0.1) + step_at(20, 0.1)))
    assert drift.alarm
    assert drift.since == pytest.approx(10, abs=1)
    assert drift.shift == pytest.approx(0.21, abs=0.03)
    assert f"since run {(drift.since or 0) + 1} of 30" in drift.text()


def test_a_change_smaller_than_what_matters_raises_no_alarm() -> None:
    values = series(6, step_at(15, 0.02), noise=0.002)
    drift = drift_of(values)
    assert drift.changes
    assert not drift.alarm
    assert drift_of(values, least=0.01).alarm


def test_known_noise_finds_in_eight_runs_what_the_runs_alone_cannot_show() -> None:
    alone, helped = 0, 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        values = np.exp(rng.normal(0, 0.02, 8)) * np.where(np.arange(8) >= 4, 1.1, 1.0)
        alone += drift_of(values).alarm
        helped += drift_of(values, noise=0.02).alarm
    assert helped > 1.3 * alone


def test_few_runs_say_so() -> None:
    drift = drift_of([1.0, 1.0, 9.0, 9.0])
    assert not drift.alarm
    assert "too few" in drift.text()


def test_a_coarse_clock_is_no_certainty() -> None:
    assert not drift_of([1.0] * 10).alarm
    assert not drift_of([1.0] * 9 + [1.001] * 4).alarm


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.floats(1e-6, 1e6),
    size=st.floats(0.0, 0.5),
    index=st.integers(6, 24),
)
def test_units_do_not_matter(seed: int, scale: float, size: float, index: int) -> None:
    values = series(seed, step_at(index, size))
    one, other = drift_of(values), drift_of(values * scale)
    assert one.alarm == other.alarm
    assert one.shift == pytest.approx(other.shift, abs=1e-6)


@pytest.mark.parametrize("dof", [4, 10, 40])
@pytest.mark.parametrize("t", [1.0, 3.0, 6.0])
def test_tail_probability_is_students(dof: int, t: float) -> None:
    assert drift_module._two_sided(t, dof) == pytest.approx(2 * stats.t.sf(t, dof), rel=0.1)


def fingerprint(**changes: object) -> Fingerprint:
    values: dict[str, object] = {
        "machine": "Linux x86_64",
        "processor": "p",
        "num_cores": 2,
        "world_size": 2,
        "threads_per_rank": 1,
        "memory_bytes": 2**33,
        "python": "3.11",
        "packages": {"torch": "2.1", "numpy": "2.0"},
        "tool_version": "0.1",
    }
    return Fingerprint.model_validate(values | changes)


def run(number: int, seconds: float, where: Fingerprint, plan: str = "a") -> Measurement:
    metrics = StepMetrics(
        step_time_s=seconds,
        tokens_per_s=1.0,
        tokens_per_s_per_gpu=1.0,
        model_flops_per_s_per_gpu=1.0,
        mfu=0.1,
    )
    return Measurement(
        id=f"{plan}{number:03d}",
        created=f"2026-01-{1 + number:02d}T00:00:00+00:00",
        plan_name=f"{plan}-under-name-{number % 2}",
        plan={"scenario_hash": "s", "parallel_hash": plan},
        metrics=metrics,
        step_time_p10_s=seconds,
        step_time_p90_s=seconds,
        step_time_samples_s=(seconds,),
        discarded_steps=0,
        fingerprint=where,
    )


OLD, NEW = fingerprint(), fingerprint(packages={"torch": "2.2", "numpy": "2.0"})


def test_a_slower_version_is_named_with_the_run_since_which() -> None:
    values = series(7, step_at(15))
    runs = [run(i, float(v), NEW if i >= 15 else OLD) for i, v in enumerate(values)]
    other = [run(i, float(v), OLD, "b") for i, v in enumerate(series(8))]
    first, second = find_drifts([*other[::-1], *runs[::-1]])
    assert first.alarm
    assert not second.alarm
    assert first.since_id == "a015"
    assert first.software == {"torch": ("2.1", "2.2")}
    assert "a015" in first.text()
    assert "torch 2.1 -> 2.2" in first.text()
    assert len(first.ids) == RUNS


def test_by_stack_each_version_is_a_series_of_its_own() -> None:
    values = series(7, step_at(15))
    runs = [run(i, float(v), NEW if i >= 15 else OLD) for i, v in enumerate(values)]
    found = find_drifts(runs, by="stack")
    assert [len(d.ids) for d in found] == [15, 15]
    assert not any(d.alarm for d in found)


def test_other_machines_and_numbers_of_ranks_are_other_series() -> None:
    assert hardware_id(OLD) == hardware_id(NEW)
    for changes in ({"processor": "q"}, {"world_size": 4}, {"gpu": "g"}, {"num_cores": 8}):
        assert hardware_id(fingerprint(**changes)) != hardware_id(OLD)


def test_a_finding_survives_its_file() -> None:
    drift = drift_of(series(1, step_at(15)))
    assert Drift.model_validate(drift.to_data()) == drift
