"""The verdict on a run's first steps, and the script that prints it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.report.check import CheckBounds, Observed, judge, main, read_observed

GIB = 2**30
BOUNDS = CheckBounds(
    plan_name="a",
    step_time_low_s=0.9,
    step_time_expected_s=1.0,
    step_time_high_s=1.2,
    step_time_stop_s=1.8,
    peak_memory_bytes=40 * GIB,
    memory_stop_bytes=78 * GIB,
    loss_stop=math.log(1000) + 0.5,
)


def seen(
    time_s: float = 1.0, loss: float = 5.0, peak: int | None = 40 * GIB, n: int = 30
) -> Observed:
    return Observed(step_time_s=(time_s,) * n, losses=(loss,) * n, peak_memory_bytes=peak)


@pytest.mark.parametrize(
    ("observed", "verdict", "words"),
    [
        (seen(), "continue", "median step time 1 s"),
        (seen(peak=None), "continue", "not recorded"),
        (seen(time_s=1.3), "look", "above the interval"),
        (seen(time_s=0.5), "look", "below the interval"),
        (seen(time_s=1.9), "stop", "stop bound"),
        (seen(peak=43 * GIB), "look", "5% above"),
        (seen(peak=79 * GIB), "stop", "may fail"),
        (seen(loss=math.nan), "stop", "not finite"),
        (seen(loss=7.5), "stop", "worse than guessing"),
        (seen(n=5), "look", "5 steps so far"),
        (seen(n=5, loss=7.5), "look", "5 steps so far"),
        (Observed(step_time_s=(), losses=()), "look", "no loss"),
    ],
)
def test_verdicts(observed: Observed, verdict: str, words: str) -> None:
    got, findings = judge(observed, BOUNDS)
    assert got == verdict
    assert any(words in f.text for f in findings), findings


def test_slow_warm_up_steps_do_not_count() -> None:
    # With the warm-up counted, the median would be one of the slow eight.
    observed = Observed(step_time_s=(30.0,) * 3 + (1.0,) * 9 + (1.3,) * 8, losses=(5.0,) * 20)
    assert judge(observed, BOUNDS)[0] == "continue"


def test_a_step_without_a_time_counts_as_a_step() -> None:
    observed = Observed(step_time_s=(1.0,) * 19, losses=(5.0,) * 20)
    assert judge(observed, BOUNDS)[0] == "continue"


@given(st.floats(0.01, 10), st.floats(0.01, 10))
def test_a_slower_run_is_never_judged_better(a: float, b: float) -> None:
    rank = {"continue": 0, "look": 1, "stop": 2}
    slow, fast = max(a, b), min(a, b)
    if fast >= BOUNDS.step_time_low_s:
        assert rank[judge(seen(slow), BOUNDS)[0]] >= rank[judge(seen(fast), BOUNDS)[0]]


def write_steps(path: Path, rows: list[dict[str, object]], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
    return path


def test_steps_of_one_plan_are_read_and_a_half_written_line_waits(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"plan": "a", "step_time_s": 1.0, "loss": 6.0, "peak_memory_bytes": 10},
        {"plan": "b", "step_time_s": 9.0, "loss": 1.0, "peak_memory_bytes": 99},
        {"plan": "a", "step_time_s": 2.0, "loss": None, "peak_memory_bytes": 11},
    ]
    observed = read_observed(write_steps(tmp_path / "steps.jsonl", rows, '{"plan": "a", "st'), "a")
    assert observed.step_time_s == (1.0, 2.0)
    assert observed.losses[0] == 6.0
    assert math.isnan(observed.losses[1])
    assert observed.peak_memory_bytes == 11
    assert read_observed(tmp_path, "b").step_time_s == (9.0,)
    with pytest.raises(InputError, match="none of this name"):
        read_observed(tmp_path, "c")


def test_a_lone_run_may_have_any_name_and_untimed_steps_do_not_count(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"plan": "a-2", "step_time_s": 9.0, "loss": 6.0, "timed": False},
        {"plan": "a-2", "step_time_s": 1.0, "loss": 5.0, "timed": True},
    ]
    observed = read_observed(write_steps(tmp_path / "steps.jsonl", rows), "a")
    assert (observed.step_time_s, observed.losses) == ((1.0,), (6.0, 5.0))


def test_steps_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"plan": plan, "step": step, "step_time_s": 1.0, "loss": 5.0}
        for run in range(2)
        for step in range(3)
        for plan in ("a", "b")  # plans of one launch take turns
    ]
    assert len(read_observed(write_steps(tmp_path / "one.jsonl", rows[:6]), "a").losses) == 3
    with pytest.raises(InputError, match=r"step \(0 after 2\): the file holds more than one run"):
        read_observed(write_steps(tmp_path / "two.jsonl", rows), "a")


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b'{"loss": "low", "step_time_s": 1}\n'])
def test_steps_that_are_none_are_no_verdict(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_bytes(content * 30)
    (tmp_path / "check.json").write_text(json.dumps(BOUNDS.to_data()))
    assert main([str(tmp_path), str(tmp_path / "check.json")]) == 64


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"step_time_s": 1}\nnot json\n{"step_time_s": 1}\n')
    with pytest.raises(InputError, match=r"steps.jsonl:2: not JSON"):
        read_observed(tmp_path, "a")
    with pytest.raises(InputError, match="cannot read the run"):
        read_observed(tmp_path / "absent", "a")
    (tmp_path / "m.json").write_text("{}")
    with pytest.raises(InputError, match="not a measurement"):
        read_observed(tmp_path / "m.json", "a")


@pytest.mark.parametrize(("time_s", "code"), [(1.0, 0), (1.5, 1), (2.0, 2)])
def test_exit_codes(time_s: float, code: int, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"plan": "a", "step_time_s": time_s, "loss": 4.0}] * 25
    write_steps(tmp_path / "steps.jsonl", rows)
    (tmp_path / "check.json").write_text(json.dumps(BOUNDS.to_data()))
    assert main([str(tmp_path), str(tmp_path / "check.json")]) == code


def test_unreadable_input_is_no_verdict(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flopwright.report.check", str(tmp_path), str(tmp_path / "none")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 64
    assert "check:" in done.stderr
    assert "Traceback" not in done.stderr
