"""Wrong input ends with a clear message and exit code 2, and nothing half-written stays."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file

MINI = "kimi_k2_mini_2cpu_fp32"


def flopwright(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flopwright", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


def refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, (result.returncode, result.stdout[-500:], result.stderr[-2000:])
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def mini_text(*changes: tuple[str, str]) -> str:
    text = dump_yaml(load_scenario(MINI))
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            [("global_batch_size", "globl_batch_size")],
            ["unknown key", "did you mean 'global_batch_size'"],
        ),
        ([("hbm: 8 GiB", "hbm: 8 GHz")], ["cluster.node.gpu.hbm", "8 GiB"[2:]]),
        ([("bandwidth: 1 GB/s", "bandwidth: 8 Gbps")], ["GB/s", "Gbit/s"]),
        ([("num_heads: 4", "num_heads: four")], ["model.attention.num_heads", "'four'"]),
        ([("top_k: 4", "top_k: 99")], ["top_k (99)", "num_experts (16)"]),
    ],
)
def test_a_broken_scenario_is_refused_with_file_and_line(
    changes: list[tuple[str, str]], words: Sequence[str], tmp_path: Path
) -> None:
    path = write(tmp_path, "mine.yaml", mini_text(*changes))
    result = flopwright("plan", path, "--out", tmp_path / "plan.yaml", cwd=tmp_path)
    refused(result, *words, "mine.yaml:")
    assert not (tmp_path / "plan.yaml").exists()


@pytest.mark.slow
def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refused(flopwright("plan", "nothing.yaml", cwd=tmp_path), "nothing.yaml")
    refused(flopwright("run", "nothing.yaml", cwd=tmp_path), "nothing.yaml")
    refused(flopwright("export", "nothing.yaml", "--to", "x", cwd=tmp_path), "nothing.yaml")
    assert not (tmp_path / "x").exists()


def test_an_impossible_split_is_refused_with_every_reason(tmp_path: Path) -> None:
    result = flopwright("plan", MINI, "--tp", "3", "--pp", "5", cwd=tmp_path)
    refused(result, "tp", "pp")


@pytest.mark.slow
def test_errors_come_as_json_too(tmp_path: Path) -> None:
    path = write(tmp_path, "mine.yaml", mini_text(("num_heads: 4", "num_headz: 4")))
    result = flopwright("plan", path, "--json", cwd=tmp_path)
    assert result.returncode == 2
    fields = {v["field"] for v in json.loads(result.stdout)["error"]}
    assert "model.attention.num_headz" in fields


def plan_text(parallel: ParallelPlan, *changes: tuple[str, str]) -> str:
    text = dump_yaml(make_plan_file(load_scenario(MINI), parallel, "p"))
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def test_a_plan_for_16_ranks_is_refused_on_2(tmp_path: Path) -> None:
    plan = ParallelPlan(dp_shard=16, micro_batch_size=1, zero_stage=1)
    path = write(tmp_path, "plan.yaml", plan_text(plan))
    result = flopwright("run", path, "--out", tmp_path / "run", "--nproc", "2", cwd=tmp_path)
    refused(result, "16", "2")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_model_that_differs_from_the_plans_is_refused(tmp_path: Path) -> None:
    plan = ParallelPlan(dp_shard=2, micro_batch_size=4, zero_stage=1)
    path = write(tmp_path, "plan.yaml", plan_text(plan, ("hidden_size: 192", "hidden_size: 256")))
    for verb in (("run", path, "--out", "run"), ("export", path, "--to", "bundle")):
        refused(flopwright(*verb, cwd=tmp_path), "model_hash", "does not match")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.yaml"]


@pytest.mark.slow
def test_text_that_is_not_there_or_too_small_is_refused(tmp_path: Path) -> None:
    plan = ParallelPlan(dp_shard=2, micro_batch_size=4, zero_stage=1)
    path = write(tmp_path, "plan.yaml", plan_text(plan))
    result = flopwright("run", path, "--out", "run", "--text", "no/such/folder", cwd=tmp_path)
    refused(result, "no/such/folder")
    assert not (tmp_path / "run").exists()
