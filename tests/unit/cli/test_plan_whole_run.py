"""`flopwright plan --whole-run` and `--phase`: output, files, options that do not go together."""

import json
from pathlib import Path

import pytest
import yaml

from flopwright.cli import main
from flopwright.plan.phases import load_run_plan, phase_of, plan_of_phase
from flopwright.spec.load import load_plan, load_scenario

K2 = "kimi_k2_all_phases_2048gpu_h800_bf16"


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["plan", *arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def mini(tmp_path: Path) -> Path:
    data = load_scenario("kimi_k2_mini_2cpu_fp32").to_data()
    rate = {"kind": "linear", "peak": 3e-4, "final": 0.0, "warmup_steps": 0}
    long = {"name": "long", "total_tokens": "1M", "seq_len": 512, "global_batch_size": 4}
    data["workload"]["later_phases"] = [long | {"learning_rate": rate, "mixture": "books"}]
    path = tmp_path / "mini.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_every_phase_is_told_and_the_sums(capsys, mini: Path, tmp_path: Path) -> None:
    out_file = tmp_path / "run.yaml"
    code, out, _ = _run(capsys, str(mini), "--whole-run", "--out", str(out_file))
    assert code == 0
    for text in (
        "2 phases: ",
        "GPU-hours",
        "long on books",
        "learning rate: warm-up",
        "linear 0.0003 to",
        "to change to it",
        "assumed: between two phases",
        "--phase long",
    ):
        assert text in out
    run = load_run_plan(out_file)
    assert [p.name for p in run.phases] == ["pretrain", "long"]
    alone = tmp_path / "plan.yaml"
    assert _run(capsys, str(mini), "--phase", "long", "--out", str(alone))[0] == 0
    assert load_plan(alone) == plan_of_phase(run, "long")


def test_json_has_the_phases_and_their_plans(capsys, mini: Path) -> None:
    code, out, _ = _run(capsys, str(mini), "--whole-run", "--restart", "90 s", "--json")
    assert code == 0
    data = json.loads(out)
    assert data["complete"] is True
    assert data["restarts_s"] == 90
    assert [p["restart_s"] for p in data["phases"]] == [0, 90]
    assert data["gpu_hours"] > sum(p["run"]["gpu_hours"] for p in data["phases"])
    assert all("plan" in p["plan"] for p in data["phases"])


def test_a_phase_without_a_plan_ends_with_one(capsys, mini: Path, tmp_path: Path) -> None:
    data = yaml.safe_load(mini.read_text())
    data["cluster"]["node"]["gpu"]["hbm"] = "64 MiB"
    mini.write_text(yaml.safe_dump(data))
    target = tmp_path / "run.yaml"
    code, out, _ = _run(capsys, str(mini), "--whole-run", "--out", str(target))
    assert code == 1
    assert "no whole run" in out
    assert "lacks" in out
    assert not target.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--restart", "5min"), "--restart: goes with --whole-run only"),
        (("--whole-run", "--tp", "1"), "tp: each phase has a search of its own"),
        (("--whole-run", "--phase", "long"), "phase: each phase has a search"),
        (("--whole-run", "--rank", "2"), "rank: each phase has a search"),
        (("--whole-run", "--restart", "soon"), "write it like 20min"),
        (("--phase", "lung"), "did you mean 'long'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    capsys, mini: Path, options: tuple[str, ...], words: str
) -> None:
    code, _, err = _run(capsys, str(mini), *options)
    assert code == 2
    assert words in " ".join(err.split())


@pytest.mark.slow
def test_kimi_k2s_published_schedule(capsys) -> None:
    code, out, _ = _run(capsys, K2, "--whole-run", "--json")
    assert code == 0
    data = json.loads(out)
    pretrain, anneal, long = data["phases"]
    assert pretrain["run"]["steps"] == 230_968
    assert anneal["searched_as"] == "pretrain"
    assert anneal["plan"]["plan"] == pretrain["plan"]["plan"] != long["plan"]["plan"]
    assert long["seq_len"] == 32_768
    flops = 6 * 32.6e9 * 15.96e12
    rate = flops / (data["gpu_hours"] * 3600)
    assert 200e12 < rate < 500e12  # FLOP/s a GPU by 6 N D, as published runs report it
    assert phase_of(load_scenario(K2), "long_context").scenario.model.attention.rope
