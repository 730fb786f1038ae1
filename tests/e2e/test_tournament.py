"""`flopwright tournament` on two ranks of this machine: stopped, taken up, told once more."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flopwright.cli import main
from flopwright.spec.load import dump_yaml, load_scenario
from flopwright.store import open_store

DOCS = Path(__file__).parents[2] / "docs"
TOO_LARGE = "kimi_k2_pretrain_2048gpu_h800_bf16"


def written(folder: Path) -> Path:
    """Writes a scenario whose steps are short."""
    scenario = load_scenario("kimi_k2_mini_open_2cpu_fp32")
    workload = scenario.workload.model_copy(
        update={"seq_len": 16, "global_batch_size": 4, "total_tokens": 16 * 4 * 4000}
    )
    scenario = scenario.model_copy(update={"workload": workload, "name": "tiny"})
    path = folder / "tiny.yaml"
    path.write_text(dump_yaml(scenario))
    return path


def command(folder: Path, *more: str) -> list[str]:
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 1000)
    line = f"{sys.executable} -m flopwright tournament tiny.yaml --out out --budget 20 --top 2"
    line += " --random 2 --probe-seconds 2 --text text.txt --tokenizer characters --nproc 2"
    return [*shlex.split(line), "--store", f"sqlite:///{folder}/store.sqlite", *more]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "FLOPWRIGHT_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}


def stop_after_turns(folder: Path, arguments: list[str]) -> int:
    """Starts the command and sends it Ctrl-C once some plans have had a turn."""
    process = subprocess.Popen(
        arguments, cwd=folder, env=environment(folder), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 300
    while not any((folder / "out").glob("*/1/rounds.jsonl")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert "goes on" in error
    return process.returncode


def told(folder: Path, arguments: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        arguments, cwd=folder, env=environment(folder), capture_output=True, text=True,
        check=True, timeout=600,
    )  # fmt: skip
    data: dict[str, Any] = json.loads(done.stdout)
    return data


@pytest.mark.slow
def test_a_tournament_is_stopped_taken_up_and_told_again(tmp_path: Path) -> None:
    written(tmp_path)
    assert stop_after_turns(tmp_path, command(tmp_path)) == 130
    state = json.loads((tmp_path / "out" / "tournament.json").read_text())
    assert not state["finished"]
    assert len(state["contenders"]) >= 2
    result = told(tmp_path, command(tmp_path, "--json"))
    by_name = {p["name"]: p for p in result["plans"]}
    best = by_name[result["best"]]["measured_step_s"]
    assert not by_name[result["best"]]["left"]
    chosen = by_name[result["chosen"]]
    assert result["finished"]
    assert result["regret"] == pytest.approx(chosen["measured_step_s"] / best - 1, abs=1e-9)
    assert -1 <= result["spearman"] <= 1
    assert result["noise_floor"] >= 0
    assert result["uncalibrated"]["chosen"] in by_name
    assert {"random", "top"} <= {o for p in result["plans"] for o in p["origins"]}
    measured = open_store(f"sqlite:///{tmp_path}/store.sqlite").measurements()
    assert {m.plan_name for m in measured} >= set(by_name)
    assert f"{result['chosen']}-again" in {m.plan_name for m in measured}
    # What the choice was made with has not seen the chosen plan run.
    own = {m.id for m in measured if m.plan_name == result["chosen"]}
    learnt = (tmp_path / "out" / "calibration.yaml").read_text()
    assert any(m.id in learnt for m in measured if m.id not in own)
    again = told(tmp_path, command(tmp_path, "--json"))
    assert again["plans"] == result["plans"]
    assert len(open_store(f"sqlite:///{tmp_path}/store.sqlite").measurements()) == len(measured)


def test_another_tournament_in_the_same_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "diary.txt").write_text("mine")
    with pytest.raises(SystemExit) as stop:
        main(["tournament", "llama_mini_2cpu_fp32", "--out", "out", "--no-store"])
    assert stop.value.code == 2
    assert "not the folder of a tournament" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["diary.txt"]


def test_a_scenario_for_more_ranks_than_there_are_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["tournament", TOO_LARGE, "--out", "out", "--no-store"])
    assert stop.value.code == 2
    assert "2048" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_page_names_every_option_and_key(capsys: pytest.CaptureFixture[str]) -> None:
    from flopwright.planner.tournament_result import PlanRow, TournamentResult

    with pytest.raises(SystemExit):
        main(["tournament", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    page = (DOCS / "tournament.md").read_text()
    assert [o for o in sorted(options) if f"`{o}" not in page] == []
    keys = [*TournamentResult.model_fields, *PlanRow.model_fields]
    assert [k for k in keys if f"`{k}`" not in page] == []
