"""Both verbs over a store of runs that a known, slower machine would have shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flopwright.cli import main
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.compare_report import ComparisonReport
from flopwright.report.metrics import Fingerprint, Measurement
from flopwright.simulator.calibration.files import load_calibration, save_calibration
from flopwright.simulator.calibration.identity import with_id
from flopwright.simulator.calibration.model import Calibration, EfficiencyCurve
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import load_scenario, make_plan_file
from flopwright.store import open_store

FINGERPRINT = Fingerprint(
    machine="m",
    processor="p",
    num_cores=2,
    world_size=2,
    threads_per_rank=1,
    memory_bytes=2**34,
    python="3.11",
    tool_version="0",
)
PLANS = {
    "dp2": ParallelPlan(dp_shard=2, micro_batch_size=4, zero_stage=1),
    "pp2": ParallelPlan(pp=2, micro_batch_size=4, data_parallel="none"),
    "ep2": ParallelPlan(dp_shard=2, ep=2, micro_batch_size=4, zero_stage=1),
}
CURVES = with_id(
    Calibration(
        id="curves",
        created="2026-01-02T03:04:05+00:00",
        source="made for a test",
        stack_id=FINGERPRINT.stack_id(),
        curves=tuple(
            EfficiencyCurve(kind=k, dtype="fp32", peak_flops_per_s=1e11, bytes_per_s=8e9)  # type: ignore[arg-type]
            for k in ("gemm", "grouped_gemm", "attention", "memory_bound", "optimizer")
        ),
    ),
    "probe",
)
# what the machine really does: compute half as fast again, communication twice as fast
TRUTH = CURVES.model_copy(
    update={
        "factors": dict.fromkeys(("forward", "backward", "optimizer"), 1.5)
        | dict.fromkeys(("dp_comm", "ep_comm", "pp_comm"), 0.5)
    }
)


def measure(name: str, fingerprint: Fingerprint = FINGERPRINT) -> Measurement:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    metrics = predict(scenario, PLANS[name], TRUTH, name=name)[0].metrics
    return Measurement(
        id=f"{name}-{fingerprint.stack_id()}",
        created="2026-01-02T03:04:05+00:00",
        plan_name=name,
        plan=make_plan_file(scenario, PLANS[name], name).to_data(),
        metrics=metrics,
        step_time_p10_s=metrics.step_time_s,
        step_time_p90_s=metrics.step_time_s,
        step_time_samples_s=(metrics.step_time_s,),
        discarded_steps=0,
        fingerprint=fingerprint,
        noise_floor=0.02,
    )


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FLOPWRIGHT_HOME", str(tmp_path / "home"))
    path = str(tmp_path / "store.sqlite")
    open_store(path).add_all([measure(name) for name in PLANS])
    save_calibration(CURVES, tmp_path / "curves.yaml")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        main(list(arguments))
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_a_plan_left_out_of_the_fit_is_predicted(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves, learnt = str(tmp_path / "curves.yaml"), str(tmp_path / "cal.yaml")
    code, out, err = run(
        capsys, "calibrate", "--store", store, "--base", curves, "--exclude", "ep2",
        "--out", learnt, "--json",
    )  # fmt: skip
    assert code == 0, err
    data = json.loads(out)
    assert data["errors"]["after"]["max_error"] < data["errors"]["before"]["max_error"] / 4
    calibration = load_calibration(learnt)
    assert calibration.base == CURVES.id
    assert len(calibration.measurements) == 2
    assert calibration.factors["forward"] == pytest.approx(1.5, rel=0.1)

    png, page = tmp_path / "c.png", tmp_path / "c.html"
    code, out, err = run(
        capsys, "compare", "--store", store, "--calibration", learnt, "--before", curves,
        "--png", str(png), "--html", str(page), "--json",
    )  # fmt: skip
    assert code == 0, err
    report = ComparisonReport.model_validate(json.loads(out))
    by_plan = {r.plan_name: r for r in report.runs}
    assert {n: r.held_out for n, r in by_plan.items()} == {"dp2": False, "pp2": False, "ep2": True}
    held = by_plan["ep2"]
    assert held.before is not None
    assert abs(held.before.error("step_time_s") or 1.0) > 0.2
    assert abs(held.after.error("step_time_s") or 1.0) < 0.05
    assert held.after.metrics[0].in_interval
    assert held.after.error("tensor_memory_bytes") == pytest.approx(0.0, abs=1e-3)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "Plotly.newPlot" in page.read_text()


def test_the_tables_name_runs_errors_and_where_to_look(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(
        capsys, "calibrate", "--store", store, "--base", str(tmp_path / "curves.yaml")
    )
    assert code == 0
    assert "forward" in out
    assert "cal-" in out
    # found again by stack, without being named
    code, out, _ = run(capsys, "compare", "--store", store, "--plan", "pp2")
    assert code == 0
    assert "pp2" in out
    assert "dp2" not in out
    assert "look first, pp2" in out
    assert "noise floor: 2.0%" in out


def test_without_a_calibration_the_prior_is_compared(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "compare", "--store", store, "--json")
    assert code == 0
    report = ComparisonReport.model_validate(json.loads(out))
    assert report.before is None
    assert all(r.after.provenance == "analytic" for r in report.runs)


def test_a_stored_plan_that_cannot_be_read_can_be_left_out(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = measure("dp2").model_copy(update={"id": "b", "plan_name": "old", "plan": {"x": 1}})
    open_store(store).add(broken)
    code, _, err = run(capsys, "compare", "--store", store)
    assert code == 2
    assert "leave it out with --exclude old" in err
    code, out, err = run(capsys, "compare", "--store", store, "--exclude", "old", "--json")
    assert code == 0, err
    names = {r.plan_name for r in ComparisonReport.model_validate(json.loads(out)).runs}
    assert names == set(PLANS)


@pytest.mark.slow
def test_a_broken_own_calibration_is_named(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "home" / "calibrations"
    folder.mkdir(parents=True)
    (folder / "cal-broken.yaml").write_text("id: [")
    for verb in ("compare", "calibrate"):
        code, _, err = run(capsys, verb, "--store", store)
        assert code == 0
        assert "cal-broken.yaml" in err, verb


def test_wrong_input_ends_with_code_2_and_writes_nothing(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = str(tmp_path / "curves.yaml")
    out_file = tmp_path / "never.yaml"
    nowhere = str(tmp_path / "stor.sqlite")
    open_store(str(tmp_path / "empty.sqlite"))
    (tmp_path / "home.png").mkdir()
    cases = (
        (("calibrate", "--store", store, "--exclude", "dp3"), "did you mean 'dp2'"),
        (("calibrate", "--store", store, "--base", "nothing"), "id of a calibration"),
        (("calibrate", "--store", store, "--only-stack", "x"), "no measurement passes"),
        (("calibrate", "--store", str(tmp_path / "empty.sqlite")), "holds no measurement yet"),
        (("calibrate", "--store", nowhere), "does not exist; did you mean 'store.sqlite'?"),
        (("compare", "--store", nowhere), "does not exist"),
        (("compare", "--store", str(tmp_path / "runs" / "x.sqlite")), "flopwright run PLAN"),
        (("compare", "--store", store, "--calibration", "missing.yaml"), "cannot read"),
        (("compare", "--store", store, "--plan", "pp3"), "did you mean 'pp2'"),
        (("compare", "--store", store, "--exclude", "pp3"), "did you mean 'pp2'"),
        (("compare", "--store", store, "--png", "x.jpg"), "is a PNG"),
        (("compare", "--store", store, "--html", "x.pdf"), "is HTML"),
        (("compare", "--store", store, "--png", str(tmp_path / "home.png")), "is a folder"),
    )
    for arguments, message in cases:
        extra = ("--out", str(out_file)) if arguments[0] == "calibrate" else ()
        code, _, err = run(capsys, *arguments, *extra)
        assert code == 2, arguments
        assert message in err, arguments
    assert not Path(nowhere).exists()
    assert not (tmp_path / "runs").exists()
    open_store(store).add(measure("dp2", FINGERPRINT.model_copy(update={"num_cores": 64})))
    code, _, err = run(
        capsys, "calibrate", "--store", store, "--base", curves, "--out", str(out_file)
    )
    assert code == 2
    assert "several hardware and software stacks" in err
    assert not out_file.exists()
