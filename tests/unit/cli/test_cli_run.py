"""`flopwright run`: what it refuses, before it writes or starts anything."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flopwright.cli import main
from flopwright.cli.run import diverged_plans, progress_display
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file


@pytest.fixture
def k2_plan(tmp_path: Path) -> Path:
    scenario = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
    plan = ParallelPlan(dp_shard=128, pp=16, ep=16, zero_stage=1)
    path = tmp_path / "k2.yaml"
    path.write_text(dump_yaml(make_plan_file(scenario, plan, "k2")))
    return path


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["run", *arguments])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_a_plan_for_many_gpus_is_refused_here(
    k2_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    message = refused([str(k2_plan), "--out", str(out)], capsys)
    assert "2048" in message
    assert "k2.yaml" in message
    assert not out.exists()


def test_a_missing_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused([str(tmp_path / "no.yaml"), "--out", str(tmp_path / "out")], capsys)
    assert "no.yaml" in message
    assert not (tmp_path / "out").exists()


def test_json_errors_are_data(k2_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", str(k2_plan), "--json"])
    violations: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["error"]
    assert any(v["field"] == "parallel.world_size" for v in violations)


def test_launching_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'deepspeed', 'tokenizers', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "import flopwright.cli.run\n"
        "import flopwright.executor.launch.local\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_without_a_terminal_progress_is_a_line_every_20_steps_of_a_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def step(plan: str, number: int) -> dict[str, Any]:
        about = {"steps": 50, "loss": 2.5, "tokens_per_s": 1200.0, "eta_s": 9}
        return {"plan": plan, "step": number, **about}

    with progress_display() as show:
        for event in ({"phase": "probe: a", "share": 0.0}, {"phase": "probe: b", "share": 0.5}):
            show(event)
        for number in [*range(3, 50, 3), 50]:  # rounds of three steps
            for plan in ("pp2", "dp2"):
                show(step(plan, number))
        show({"phase": "evaluate", "share": 0.0})
    with progress_display(quiet=True) as show:
        show(step("pp2", 50))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "probe"
    assert lines[1] == "pp2: step 3/50, loss 2.5000, 1,200 tokens/s, 9 s left"
    assert lines[-1] == "evaluate"
    for plan in ("pp2", "dp2"):
        said = [line.partition(",")[0] for line in lines if line.startswith(plan)]
        assert said == [f"{plan}: step {n}/50" for n in (3, 21, 42, 50)]


def test_a_plan_whose_loss_stops_being_a_number_is_named_with_its_step() -> None:
    fine = SimpleNamespace(plan_name="dp2", losses=(3.0, 2.0, 1.0))
    gone = SimpleNamespace(plan_name="pp2", losses=(3.0, 2.5, math.nan, math.inf))
    assert diverged_plans([fine]) == []
    assert diverged_plans([fine, gone]) == ["pp2 from step 3 on"]
