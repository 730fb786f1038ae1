"""`flopwright plan` with plans to compare with, software stacks and fixed fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flopwright.cli import main

MINI = "kimi_k2_mini_2cpu_fp32"


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["plan", *arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_a_plan_in_words_has_its_memory_rank_and_what_is_better(capsys) -> None:
    code, out, _ = _run(capsys, MINI, "--also", "pp=2 mbs=4")
    assert code == 0
    assert "pp=2 mbs=4: pp2 dp1 mbs4" in out
    assert "Memory of pp=2 mbs=4 by pipeline stage (MiB)" in out
    assert "Rank: " in out
    assert "layouts that fit" in out
    assert "Better, and why:" in out


@pytest.mark.slow
def test_a_plan_file_stands_beside_the_best(capsys, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert _run(capsys, MINI, "--out", str(path))[0] == 0
    code, out, _ = _run(capsys, MINI, "--json", "--no-refine", "--also", str(path))
    assert code == 0
    (found,) = json.loads(out)["also"]
    assert found["fits"]
    assert found["rank"] <= found["layouts"]
    assert found["rank"] == 1 + len(found["better"])
    assert found["name"] == str(path)


def test_refined_steps_have_a_column_of_their_own(capsys) -> None:
    assert "by events (s)" in _run(capsys, MINI)[1]
    assert "by events (s)" not in _run(capsys, MINI, "--no-refine")[1]


@pytest.mark.slow
def test_any_field_can_be_fixed(capsys) -> None:
    code, out, _ = _run(capsys, MINI, "--json", "--fix", "dp=1", "--fix", "pp=2")
    assert code == 0
    plans = [r["plan"] for r in json.loads(out)["result"]["ranked"]]
    assert plans
    assert {p["pp"] for p in plans} == {2}
    told = _run(capsys, MINI, "--fix", "etp=1")[1]
    assert "--fix etp=1" in told  # the command to go on with holds it too


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--stack", "nemo"], "no such software stack"),
        (["--stack", "prior", "--calibration", "prior-cpu"], "a calibration has its stack"),
        (["--fix", "etp"], "needs a value"),
        (["--fix", "ept=2"], "did you mean"),
        (["--also", "pq=2"], "not a field of a plan"),
        (["--also", "pp=3"], "world_size"),
        (["--published"], "no published plan is known of this scenario"),
    ],
)
def test_options_that_cannot_be_used_end_with_code_2(capsys, options, text) -> None:
    code, _, err = _run(capsys, MINI, *options)
    assert code == 2
    assert text in " ".join(err.split())


def test_a_stack_changes_what_a_plan_takes_and_is_named(capsys) -> None:
    steps = {}
    for stack in ("prior", "nemo-2025"):
        name = "llama31_405b_pretrain_16384gpu_h100_bf16"
        fixed = ["--fix", "recompute_layers=1", "--recompute", "full", "--pp", "16", "--tp", "8"]
        code, out, _ = _run(
            capsys, name, "--json", "--no-refine", "--top", "1", "--stack", stack, *fixed
        )
        assert code == 0
        (best,) = json.loads(out)["result"]["ranked"]
        steps[stack] = best["prediction"]["metrics"]["step_time_s"]
        assert ("nemo-2025-dense" in best["prediction"]["calibration_id"]) == (stack != "prior")
    assert steps["prior"] != pytest.approx(steps["nemo-2025"], rel=1e-3)
