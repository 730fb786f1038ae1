"""Learning goes on from run to run, from one software to the next, and a change is said."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from flopwright.errors import InputError
from flopwright.report.metrics import Fingerprint, Interval, Measurement, Prediction, StepMetrics
from flopwright.simulator.calibration.drift import drift_of
from flopwright.simulator.calibration.files import default_calibration, save_calibration
from flopwright.simulator.calibration.fit_runs import fit_runs, update_runs
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.predict import predict as simulate
from flopwright.spec.load import load_scenario

HERE: dict[str, Any] = {
    "machine": "m", "processor": "p", "num_cores": 2, "world_size": 2, "threads_per_rank": 1,
    "memory_bytes": 2**33, "python": "3.11", "packages": {"torch": "2.13"}, "tool_version": "0",
}  # fmt: skip
CURVES = {"forward": 1.0, "backward": 2.0, "dp_comm": 0.4, "optimizer": 0.3}
BASE = Calibration(id="base", created="", source="curves for a test")


def where(**changes: Any) -> Fingerprint:
    return Fingerprint.model_validate(HERE | changes)


def metrics(time_s: dict[str, float]) -> StepMetrics:
    return StepMetrics(
        step_time_s=sum(time_s.values()), tokens_per_s=1, tokens_per_s_per_gpu=1,
        model_flops_per_s_per_gpu=1, mfu=0, time_s=time_s,
    )  # fmt: skip


def run(name: str, factor: float, noise: float = 0.0, **changes: Any) -> Measurement:
    rng = np.random.default_rng(list(name.encode()))
    time_s = {c: s * factor * math.exp(rng.normal(0, noise)) for c, s in CURVES.items()}
    found = metrics(time_s)
    return Measurement(
        id=name, created="2026-01-02", plan_name="dp2", plan={}, metrics=found,
        step_time_p10_s=1, step_time_p90_s=1, step_time_samples_s=(found.step_time_s,),
        discarded_steps=0, fingerprint=where(**changes),
    )  # fmt: skip


def predict(calibration: Calibration, measurement: Measurement) -> Prediction:
    time_s = {c: s * calibration.factors.get(c, 1.0) for c, s in CURVES.items()}
    return Prediction(
        plan_name="dp2", metrics=metrics(time_s), provenance="calibrated",
        step_time_interval=Interval(low=0, high=1e9),
    )  # fmt: skip


def error(calibration: Calibration, measurement: Measurement) -> float:
    found = predict(calibration, measurement).metrics.step_time_s
    return abs(found / measurement.metrics.step_time_s - 1)


def test_an_update_learns_from_new_runs_alone_and_keeps_the_old_ones_lesson() -> None:
    first = fit_runs(BASE, [run(f"a{i}", 1.5, 0.02) for i in range(6)], predict)
    later = update_runs(first, [run("a0", 9.0), run("b", 1.5, 0.02)], predict)
    assert set(later.measurements) == {*first.measurements, "b"}
    assert later.step_residual_dof == 4 + 7
    assert later.id != first.id
    assert later.base == first.id
    assert error(later, run("c", 1.5)) < 0.02
    assert max(later.factor_log_std.values()) <= max(first.factor_log_std.values()) + 0.05
    with pytest.raises(InputError, match="all of these runs already"):
        update_runs(first, [run("a0", 1.5)], predict)


def test_updates_follow_a_machine_that_has_changed() -> None:
    now = fit_runs(BASE, [run(f"a{i}", 1.5, 0.01) for i in range(6)], predict)
    before = error(now, run("c", 1.8))
    for i in range(4):
        now = update_runs(now, [run(f"b{i}", 1.8, 0.01)], predict)
    assert error(now, run("c", 1.8)) < 0.3 * before


def test_learning_anew_forgets_what_runs_before_said() -> None:
    first = fit_runs(BASE, [run(f"a{i}", 1.5) for i in range(3)], predict)
    again = fit_runs(first, [run(f"b{i}", 0.8) for i in range(3)], predict)
    alone = fit_runs(BASE, [run(f"b{i}", 0.8) for i in range(3)], predict)
    assert again.factors == pytest.approx(alone.factors)


def test_other_software_on_the_same_hardware_is_a_prior_other_hardware_is_refused() -> None:
    old = fit_runs(BASE, [run(f"a{i}", 1.5, 0.02) for i in range(8)], predict)
    new = run("n", 1.6, packages={"torch": "2.14"})
    learnt = fit_runs(old, [new], predict)
    assert learnt.stack_id == new.fingerprint.stack_id() != old.stack_id
    assert "other software" in update_runs(old, [new], predict).source
    with pytest.raises(InputError, match="other hardware"):
        fit_runs(old, [run("x", 1.0, processor="another")], predict)


@pytest.mark.parametrize(("factor", "alarm"), [(1.5, False), (1.52, False), (1.9, True)])
def test_runs_that_drift_from_a_calibration_are_said(factor: float, alarm: bool) -> None:
    learnt = fit_runs(BASE, [run(f"a{i}", 1.5, 0.02) for i in range(12)], predict)
    drift = drift_of(learnt, [run(f"d{i}", factor, 0.02) for i in range(12)], predict)
    assert drift.alarm is alarm
    assert drift.runs == 12
    assert ("calibrate again" in drift.text()) is alarm
    assert abs(drift.shift_log - math.log(factor / 1.5)) < 0.05


def test_runs_of_new_software_are_named_and_do_not_count_as_drift() -> None:
    learnt = fit_runs(BASE, [run(f"a{i}", 1.5, 0.02) for i in range(4)], predict)
    drift = drift_of(learnt, [run("n", 3.0, packages={"torch": "2.14"})], predict)
    assert not drift.alarm
    assert drift.runs == 0
    assert drift.stacks == (run("n", 3.0, packages={"torch": "2.14"}).fingerprint.stack_id(),)


def test_a_calibration_moves_nothing_on_other_hardware(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOPWRIGHT_HOME", str(tmp_path))
    names = ("kimi_k2_pretrain_2048gpu_h800_bf16", "llama31_405b_pretrain_16384gpu_h100_bf16")
    scenarios = [load_scenario(name) for name in names]
    before = [default_calibration(s.cluster.node.gpu).id for s in scenarios]
    own = load_scenario("kimi_k2_mini_2cpu_fp32")
    plan = simulate_plan()
    step = simulate(own, plan)[0].metrics.step_time_s
    learnt = fit_runs(BASE, [run(f"a{i}", 3.0) for i in range(5)], predict)
    save_calibration(learnt)
    assert [default_calibration(s.cluster.node.gpu).id for s in scenarios] == before
    # not even on the machine it is of, unless it is asked for
    assert simulate(own, plan)[0].metrics.step_time_s == step
    assert simulate(own, plan, learnt)[0].metrics.step_time_s > 1.5 * step


def simulate_plan() -> Any:
    from flopwright.plan.parallel import ParallelPlan

    return ParallelPlan(dp_shard=2, micro_batch_size=4)
