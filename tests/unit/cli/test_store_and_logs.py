"""`store`, `import-log` and `compare` on a store of simulated runs and of other programs' logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flopwright.cli import app
from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.compare_report import ComparisonReport
from flopwright.report.drift import find_drifts
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.comparison.simulated import simulated_measurement
from flopwright.simulator.engine.perturb import Perturbation
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file
from flopwright.store import open_store
from flopwright.store.frame import __doc__ as frame_doc
from flopwright.store.frame import comparison_frame

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def plan_file(folder: Path, gpus: int = 2) -> Path:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    plan = make_plan_file(scenario, ParallelPlan(dp_shard=gpus, micro_batch_size=2), "dp2")
    path = folder / "plan.yaml"
    path.write_text(dump_yaml(plan))
    return path


def megatron_log(path: Path, times_ms: list[float], batch: int = 16, day: int = 1) -> None:
    """Writes lines in Megatron-LM's own format (its `training_log`)."""
    lines = []
    for step, time_ms in enumerate(times_ms, 1):
        text = f" [2026-01-{day:02d} 00:{step:02d}:00] iteration {step:8d}/{100:8d} |"
        text += f" consumed samples: {step * batch:12d} |"
        text += f" elapsed time per iteration (ms): {time_ms:.1f} |"
        text += f" learning rate: {1e-4:.6E} | global batch size: {batch:5d} |"
        text += f" lm loss: {2.5:.6E} | loss scale: {1.0:.1f} | grad norm: {1.0:.3f} |"
        text += f" number of skipped iterations: {0:3d} | number of nan iterations: {0:3d} |"
        lines.append(text + "\n")
    path.write_text("".join(lines))


def test_a_megatron_log_is_compared_with_its_plan(tmp_path: Path) -> None:
    store, log = str(tmp_path / "s.sqlite"), tmp_path / "train.log"
    plan = str(plan_file(tmp_path))
    megatron_log(log, [900.0, 500.0, 400.0, *([300.0] * 8)])
    arguments = ("import-log", str(log), "--as", "megatron", "--plan", plan, "--store", store)
    text = run(*arguments, "--software", "mcore-0.16", "--discard", "3")
    assert "300 ms a step, the median of 8 lines" in text
    assert "there already" in run(*arguments, "--software", "mcore-0.16")
    (kept,) = open_store(store).measurements()
    assert kept.metrics.step_time_s == pytest.approx(0.3)
    assert kept.fingerprint.tool_version == "megatron mcore-0.16"
    report = json.loads(run("compare", "--store", store, "--json"))
    after = report["runs"][0]["after"]
    assert after["metrics"][0]["measured"] == pytest.approx(0.3)
    assert after["time_classes"] == []
    # a log tells no classes of time, which is not that they took none
    frame = open_store(store).frame()
    assert frame["time_forward_s"].isna().all()
    assert frame["time_idle_s"].isna().all()
    assert "dp2" in run("store", "show", "--store", store)


def test_machines_have_series_of_their_own_in_the_order_of_their_dates(tmp_path: Path) -> None:
    """12 % planted on one of two equal machines, whose logs are imported newest first."""
    store, plan = str(tmp_path / "s.sqlite"), str(plan_file(tmp_path))
    noise = (1.004, 0.995, 1.0, 1.006, 0.997, 1.002)
    for machine, slow_since in (("node-a", 99), ("node-b", 7)):
        for day in range(12, 0, -1):
            step_ms = 300.0 * noise[day % 6] * (1.12 if day >= slow_since else 1.0)
            log = tmp_path / "train.log"
            megatron_log(log, [step_ms] * 8, day=day)
            out = run("import-log", str(log), "--as", "megatron", "--plan", plan, "--store", store,
                      "--machine", machine, "--json")  # fmt: skip
            assert json.loads(out)["record"]["created"] == f"2026-01-{day:02d}T00:08:00+00:00"
    kept = open_store(store).measurements()
    assert len(kept) == 24
    assert len({m.fingerprint.stack_id() for m in kept}) == 1
    slow, steady = find_drifts(kept)
    assert slow.alarm
    assert slow.where.startswith("node-b (")
    assert slow.since_created == "2026-01-07T00:08:00+00:00"
    assert not steady.alarm
    assert steady.where.startswith("node-a (")
    # one series of both would have hidden it: every other run is a fast one
    mixed = [m.model_copy(update={"fingerprint": m.fingerprint.model_copy(update={"host": ""})})
             for m in kept]  # fmt: skip
    assert not any(d.alarm for d in find_drifts(mixed))


def test_a_machine_is_asked_for_where_there_is_a_series(tmp_path: Path) -> None:
    logs = ROOT / "tests/unit/store/foreign/logs"
    with pytest.raises(InputError, match=r"--machine.*a log of verl is no step"):
        run("import-log", str(logs / "verl.log"), "--as", "verl", "--machine", "node-a")
    with pytest.raises(InputError, match=r"--machine.*printable text"):
        run("import-log", str(logs / "megatron.log"), "--as", "megatron", "--machine", "")


def test_a_log_of_another_batch_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    megatron_log(log, [300.0] * 4, batch=512)
    arguments = ("import-log", str(log), "--as", "megatron", "--plan", str(plan_file(tmp_path)))
    with pytest.raises(InputError, match=r"train\.log:1.*512.*16 sequences a step"):
        run(*arguments, "--store", str(tmp_path / "s.sqlite"))
    with pytest.raises(InputError, match="does not say what ran"):
        run("import-log", str(log), "--as", "megatron", "--store", str(tmp_path / "s.sqlite"))


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "bad\udc80name", "x" * 201])
def test_a_name_that_no_table_can_show_is_refused(name: str, tmp_path: Path) -> None:
    log, store = tmp_path / "train.log", tmp_path / "s.sqlite"
    megatron_log(log, [300.0] * 4)
    plan = str(plan_file(tmp_path))
    with pytest.raises(InputError, match=r"--name.*printable text"):
        run("import-log", str(log), "--as", "megatron", "--plan", plan, "--name", name,
            "--store", str(store))  # fmt: skip
    assert not store.exists()


def test_rounds_and_engine_lines_go_into_the_store(tmp_path: Path) -> None:
    logs = ROOT / "tests/unit/store/foreign/logs"
    store = str(tmp_path / "s.sqlite")
    out = json.loads(
        run("import-log", str(logs / "verl.log"), "--as", "verl", "--gpus", "8", "--name", "grpo",
            "--store", store, "--json")
    )  # fmt: skip
    assert out["new"] is True
    run("import-log", str(logs / "sglang.log"), "--as", "sglang", "--store", store)
    rows = json.loads(run("store", "show", "--store", store, "--json"))["rows"]
    assert [(r["kind"], r["plan_name"], r["round_time_s"]) for r in rows] == [
        ("round", "grpo", 96.551)
    ]
    assert len(open_store(store).records(kind="engine")) == 1


def test_a_store_moves_by_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    one, two, file = (str(tmp_path / n) for n in ("1.sqlite", "2.sqlite", "runs.parquet"))
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    plan = make_plan_file(scenario, ParallelPlan(dp_shard=2, micro_batch_size=2), "dp2")
    calibration = default_calibration(scenario.cluster.node.gpu)
    open_store(one).add(simulated_measurement(plan, calibration, samples=1))
    assert "1 record" in run("store", "export", file, "--store", one)
    assert json.loads(run("store", "import", file, "--store", two, "--json"))["new"] == 1
    with pytest.raises(InputError, match="needs a file"):
        run("store", "export", "--store", one)
    with pytest.raises(InputError, match="does not exist"):
        run("store", "show", "--store", str(tmp_path / "none.sqlite"))


@pytest.mark.slow
def test_compare_names_the_slow_rank(tmp_path: Path) -> None:
    store = str(tmp_path / "s.sqlite")
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    calibration = default_calibration(scenario.cluster.node.gpu)
    kept = open_store(store)
    for name, split in (("dp2", {"dp_shard": 2}), ("pp2", {"pp": 2})):
        plan = make_plan_file(scenario, ParallelPlan(micro_batch_size=2, **split), name)
        slow = Perturbation(jitter=0.02, stragglers={1: 1.5})
        kept.add(simulated_measurement(plan, calibration, slow, samples=3, name=name))
    text = run("compare", "--store", store, "--by", "rank")
    assert "look first, dp2: rank 1: predicted" in text
    assert "look first, pp2: rank 1: predicted" in text
    assert "busy seconds by link" in text
    for by in ("plan", "phase", "stack"):
        assert f"step-time errors by {by}" in run("compare", "--store", store, "--by", by)
    report = json.loads(run("compare", "--store", store, "--json"))
    for found in report["runs"]:
        split = found["after"]["split"]
        error = found["after"]["metrics"][0]["signed_error"]
        assert split["cost"] + split["structure"] == pytest.approx(error)
        assert found["phase"] == "pretrain, 128 tokens"
    frame = comparison_frame(ComparisonReport.model_validate(report).runs)
    assert list(frame["source"]) == ["predicted", "measured"] * 2
    measured = frame[(frame["source"] == "measured") & (frame["plan_name"] == "dp2")].iloc[0]
    (dp2,) = kept.measurements(plan_name="dp2")
    assert measured["step_time_s"] == dp2.metrics.step_time_s
    assert measured["time_backward_s"] == pytest.approx(dp2.metrics.time_s["backward"])


@pytest.mark.slow
def test_compare_ends_with_1_where_a_plan_became_slower(tmp_path: Path) -> None:
    store = str(tmp_path / "s.sqlite")
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    plan = make_plan_file(scenario, ParallelPlan(dp_shard=2, micro_batch_size=2), "dp2")
    base = simulated_measurement(
        plan, default_calibration(scenario.cluster.node.gpu), samples=1, name="dp2"
    )
    kept = open_store(store)
    noise = [1.004, 0.995, 1.0, 1.006, 0.997, 1.002, 0.999, 1.003]
    for day in range(16):
        factor = noise[day % 8] * (1.2 if day >= 8 else 1.0)
        step_s = base.metrics.step_time_s * factor
        metrics = base.metrics.model_copy(update={"step_time_s": step_s})
        kept.add(
            base.model_copy(
                update={"id": f"d{day}", "created": f"2026-01-{day + 1:02d}T00:00:00+00:00",
                        "metrics": metrics}
            )
        )  # fmt: skip
    text = run("compare", "--store", store, "--alarm", code=1)
    assert "slower:" in text
    run("compare", "--store", store)


def test_the_table_of_the_docs_is_the_modules() -> None:
    assert frame_doc is not None
    table = frame_doc[frame_doc.index("| column") :].strip()
    assert table in (ROOT / "docs/store.md").read_text()


def test_every_option_stands_in_its_page() -> None:
    for verb, page in (("compare", "compare"), ("store", "store"), ("import-log", "store")):
        text = (ROOT / f"docs/{page}.md").read_text()
        for word in run(verb, "--help").split():
            if word.startswith("--") and word.strip(",.") not in {"--help"}:
                assert word.strip(",.[]") in text, (verb, word)
