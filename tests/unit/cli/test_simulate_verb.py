"""`flopwright simulate`: what it prints, writes and refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from flopwright.cli import main
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file

SCENARIO = "kimi_k2_pretrain_2048gpu_h800_bf16"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan file of a short pipeline over all 2,048 GPUs."""
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    parallel = ParallelPlan(pp=4, ep=16, tp=8, dp_shard=64, zero_stage=1)
    path.write_text(dump_yaml(make_plan_file(load_scenario(SCENARIO), parallel, "p"), ""))
    return path


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["simulate", SCENARIO, *map(str, arguments)])
    return int(stop.value.code or 0)


def data_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_json_holds_the_step(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = data_of(capsys, "--plan", plan, "--private-links")
    replayed = data_of(capsys, "--plan", plan, "--engine", "replay")
    assert events["step_time_s"] == pytest.approx(replayed["step_time_s"], abs=1e-9)
    assert sum(events["time_s"].values()) == pytest.approx(events["step_time_s"], rel=1e-9)
    assert [m["stage"] for m in events["memory"]] == [0, 1, 2, 3]
    assert events["memory"][3]["peak_action"].startswith("B(3,")
    assert 0 < events["bubble"] < 1
    assert events["num_events"] > 0 == replayed["num_events"]


def test_a_table_for_people(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--plan", plan, "--engine", "replay") == 0
    out = capsys.readouterr().out
    for word in ("step ", "bubble", "forward", "ep_comm", "peak (GiB)", "fullest at", "B(0,"):
        assert word in out


@pytest.mark.slow
def test_traces_are_one_file_or_a_folder_of_ranks(plan: Path, tmp_path: Path) -> None:
    one, folder = tmp_path / "t.json.gz", tmp_path / "ranks"
    assert run("--plan", plan, "--trace", one) == 0
    assert run("--plan", plan, "--trace", folder) == 0
    whole = json.loads(gzip.decompress(one.read_bytes()))
    assert {e["pid"] for e in whole["traceEvents"]} == {0, 1, 2, 3}
    files = sorted(p.name for p in folder.iterdir())
    assert files == [f"rank-{r}.json.gz" for r in range(4)]
    data = json.loads(gzip.decompress((folder / "rank-2.json.gz").read_bytes()))
    assert data["distributedInfo"]["rank"] == 2
    kernels = data["traceEvents"]
    slices = [e for e in whole["traceEvents"] if e["ph"] == "X" and e["pid"] == 2]
    assert [(k["ts"], k["dur"]) for k in kernels] == [(s["ts"], s["dur"]) for s in slices]
    comm = [k["name"].startswith("nccl") for k in kernels]
    assert comm == [20 <= s["tid"] < 30 for s in slices]


def test_a_picture(plan: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run("--plan", plan, "--png", tmp_path / "t.png", "--engine", "replay") == 0
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--straggler", "x=2"), "RANK=FACTOR"),
        (("--straggler", "1=0"), "above 0"),
        (("--straggler", "1=2", "--straggler", "01=3"), "has a factor already"),
        (("--slow-link", "9999=2"), "0 to 2047"),
        (("--jitter", "-1"), "standard deviation"),
        (("--trace", "t.txt"), ".json"),
        (("--png", "t.jpg"), "PNG"),
    ],
)
def test_what_cannot_be_used_ends_with_2_and_a_reason(
    plan: Path, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--plan", plan, *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_missing_plan_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--plan", "nowhere.yaml") == 2
    assert "nowhere.yaml" in capsys.readouterr().err


def test_a_plan_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.yaml"
    other = load_scenario("kimi_k2_mini_2cpu_fp32")
    path.write_text(dump_yaml(make_plan_file(other, ParallelPlan(dp_shard=2), "p"), ""))
    assert run("--plan", path) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert f"the plan is for {other.model.name}" in error
    assert f"flopwright plan {SCENARIO}" in error


def test_nothing_is_written_if_one_of_two_files_cannot_be(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    files = ("--png", tmp_path / "t.png", "--trace", tmp_path / "file" / "ranks")
    assert run("--plan", plan, "--engine", "replay", *files) == 2
    assert "--trace" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_a_step_that_does_not_fit_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "full.yaml"
    parallel = ParallelPlan(pp=4, ep=8, tp=8, dp_shard=8)
    path.write_text(dump_yaml(make_plan_file(load_scenario(SCENARIO), parallel, "p"), ""))
    data = data_of(capsys, "--plan", path, "--engine", "replay")
    most = max(m["peak_bytes"] for m in data["memory"])
    assert data["fits"] is False
    assert most > data["gpu_memory_bytes"] > 0
    assert run("--plan", path, "--engine", "replay") == 0
    assert "does not fit" in capsys.readouterr().out
