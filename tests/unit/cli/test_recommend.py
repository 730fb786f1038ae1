"""`flopwright recommend` as users call it: questions, output, exit codes, bad input."""

import json
from pathlib import Path

import pytest

from flopwright.cli import main
from flopwright.spec.load import load_scenario

MINI = "kimi_k2_mini_2cpu_fp32"


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["recommend", MINI, *arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_answer_comes_first_with_its_plan_and_reasons(capsys) -> None:
    code, out, _ = _run(capsys, "--deadline", "1h")
    assert code == 0
    assert out.startswith("2 GPUs in 60 min")
    for text in ("80 % interval", "Tried", "Plan:", "What binds it", "Provenance", "assumed:"):
        assert text in out


def test_no_answer_ends_with_1_and_says_what_is_missing(capsys) -> None:
    code, out, _ = _run(capsys, "--deadline", "20s")
    assert code == 1
    assert "What is missing" in out
    assert "too long" in out
    assert "cannot grow" in out  # one machine without a network


def test_json_is_one_object_and_the_scenario_is_written(capsys, tmp_path: Path) -> None:
    target = tmp_path / "optimal.yaml"
    arguments = ("--compute-optimal", "1e15 FLOP", "--out", str(target), "--json")
    code, out, _ = _run(capsys, *arguments)
    assert code == 0
    data = json.loads(out)
    assert data["question"] == "compute_optimal"
    assert data["found"]
    assert data["optimum"]["flops"] == 1e15
    assert data["plan"]["prediction"]["step_time_interval"]["low"] > 0
    assert any("2404.10102" in source for source in data["sources"])
    written = load_scenario(target)
    assert written.model.name == data["scenario"]["model"]["name"]


def test_the_older_constants_are_an_option(capsys) -> None:
    _, out, _ = _run(capsys, "--compute-optimal", "1e15", "--law", "hoffmann", "--json")
    data = json.loads(out)
    assert data["optimum"]["law"] == "hoffmann"
    assert any("2203.15556" in source for source in data["sources"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "ask a question"),
        (("--deadline", "1h", "--largest-model"), "ask one question"),
        (("--deadline", "30"), "30d"),
        (("--deadline", "0d"), "above zero"),
        (("--budget", "2X"), "--budget"),
        (("--budget", "2M"), "price"),
        (("--compute-optimal", "7 GPU-weeks"), "GPU-days"),
        (("--compute-optimal", "1e15", "--law", "hofman"), "did you mean 'hoffmann'"),
        (("--compute-optimal", "1 kFLOP"), "one step"),
        (("--longest-context", "--sure"), "--deadline"),
        (("--deadline", "1h", "--law", "hoffmann"), "--compute-optimal"),
        (("--deadline", "1h", "--out", "a.txt"), "YAML"),
        (("--deadline", "1h", "--max-gpus", "1"), "max_gpus"),
    ],
)
def test_bad_input_ends_with_2_and_a_fix(capsys, arguments, told) -> None:
    code, _, err = _run(capsys, *arguments)
    assert code == 2
    assert told in err
