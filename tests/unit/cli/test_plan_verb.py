"""`flopwright plan` as users call it: output, exit codes, files, bad input."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flopwright.cli import main
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import load_plan, load_scenario
from flopwright.units import parse_quantity

MINI = "kimi_k2_mini_2cpu_fp32"


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["plan", *arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def _small_machine(folder: Path, hbm: str) -> Path:
    scenario = load_scenario(MINI).to_data()
    scenario["cluster"]["node"]["gpu"]["hbm"] = hbm
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(scenario))
    return path


def test_verdict_comes_first_and_everything_is_said(capsys) -> None:
    code, out, _ = _run(capsys, MINI)
    assert code == 0
    assert out.startswith("fits: kimi_k2_mini on 2 x cpu_core")
    for text in (
        "Best plans",
        "80 % interval",
        "tokens/s/GPU",
        "MFU (%)",
        "Memory of plan 1 by pipeline stage",
        "80 steps",
        "GPU-hours",
        "What binds it",
        "Provenance",
        "assumed:",
        "Go on: flopwright plan",
    ):
        assert text in out


def test_json_holds_the_result_in_si_units(capsys) -> None:
    code, out, _ = _run(capsys, MINI, "--json", "--top", "3")
    assert code == 0
    data = json.loads(out)
    assert set(data) == {
        "scenario",
        "verdict",
        "verdict_text",
        "chosen_rank",
        "binding",
        "whole_run",
        "written",
        "result",
        "also",
    }
    assert data["verdict"] == "fits"
    assert [r["rank"] for r in data["result"]["ranked"]] == [1, 2, 3]
    metrics = data["result"]["ranked"][0]["prediction"]["metrics"]
    assert metrics["step_time_s"] > 0
    assert data["whole_run"]["steps"] == 80
    assert sum(metrics["time_s"].values()) == pytest.approx(metrics["step_time_s"])


def test_a_written_plan_loads_and_holds_the_prediction(capsys, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    code, out, _ = _run(capsys, MINI, "--json", "--rank", "2", "--out", str(path))
    assert code == 0
    data = json.loads(out)
    assert data["written"] == str(path)
    assert data["chosen_rank"] == 2
    plan = load_plan(path)
    chosen = data["result"]["ranked"][1]
    assert plan.parallel == ParallelPlan.model_validate(chosen["plan"])
    assert plan.predicted is not None
    assert plan.predicted.step_time_s == chosen["prediction"]["metrics"]["step_time_s"]
    assert plan.scenario == load_scenario(MINI)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.yaml"]


def test_fixed_fields_reach_the_plan(capsys) -> None:
    code, out, _ = _run(capsys, MINI, "--json", "--pp", "2", "--vpp", "1")
    assert code == 0
    (only,) = json.loads(out)["result"]["ranked"]
    assert (only["plan"]["pp"], only["plan"]["vpp"]) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (("--pp", "3"), ("parallel.world_size", "the cluster has 2 GPUs")),
        (("--tp", "2", "--dp", "2"), ("must not exceed the cluster's GPUs",)),
        (("--zero", "7"), ("zero_stage", "0 to 3")),
        (("--recompute", "ful"), ("did you mean 'full'",)),
        (("--schedule", "gpipe", "--vpp", "2"), ("parallel.schedule",)),
        (("--fp8-activations",), ("no FP8 format",)),
        (("--rank", "99", "--top", "3"), ("fewer plans that fit",)),
        (("--calibration", "nothing_like_it"), ("calibration",)),
        (("--out", "plan.txt"), ("written as YAML",)),
    ],
)
def test_impossible_input_ends_with_code_2(capsys, tmp_path, monkeypatch, options, texts) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = _run(capsys, MINI, *options)
    assert code == 2
    assert "problem" in err
    for text in texts:
        assert text in err
    assert "Traceback" not in out + err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_scenario_is_suggested(capsys) -> None:
    code, _, err = _run(capsys, "kimi_k2_mini_2cpu_fp23")
    assert code == 2
    assert MINI in err


def test_what_does_not_fit_ends_with_code_1_and_writes_nothing(capsys, tmp_path: Path) -> None:
    scenario = _small_machine(tmp_path, "16 MiB")
    path = tmp_path / "plan.yaml"
    code, out, _ = _run(capsys, str(scenario), "--out", str(path))
    assert code == 1
    assert out.startswith("does not fit: ")
    assert "Nearest plans" in out
    assert re.search(r"lacks [\d.]+ MiB on stage 0", out)
    assert not path.exists()
    code, out, _ = _run(capsys, str(scenario), "--json")
    data = json.loads(out)
    assert code == 1
    assert data["verdict"] == "does_not_fit"
    assert data["written"] is None
    assert data["result"]["infeasible"][0]["missing_bytes"] > 0


def test_go_on_repeats_the_fixed_fields(capsys) -> None:
    _, out, _ = _run(capsys, MINI, "--pp", "2", "--zero", "0", "--no-activation-offload")
    assert (
        f"Go on: flopwright plan {MINI} --pp 2 --zero 0 --no-activation-offload --out plan.yaml"
        in out
    )


def test_help_documents_the_exit_codes(capsys) -> None:
    code, out, _ = _run(capsys, "--help")
    assert code == 0
    assert "Exit code 0" in " ".join(out.split())
    assert "nothing fits" in " ".join(out.split())


@pytest.mark.slow
def test_plan_works_with_torch_blocked() -> None:
    blocked = (
        "import sys\n"
        "for name in ('torch', 'deepspeed', 'triton', 'tokenizers'): sys.modules[name] = None\n"
        "from flopwright.cli import main\n"
        f"main(['plan', '{MINI}', '--json', '--top', '1'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", blocked], capture_output=True, text=True, timeout=300, check=True
    )
    assert json.loads(done.stdout)["verdict"] == "fits"


def test_memory_in_the_plan_file_is_text_with_its_unit(capsys, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    _run(capsys, MINI, "--out", str(path))
    predicted = yaml.safe_load(path.read_text())["predicted"]
    assert parse_quantity(predicted["peak_memory"], "bytes") > 2**20
    assert parse_quantity(predicted["step_time"], "seconds") > 0
