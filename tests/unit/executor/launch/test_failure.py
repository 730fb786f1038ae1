"""Whose word is taken on why a run ended, and which folders a run may use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flopwright.executor.launch.checks import run_folder_rules
from flopwright.executor.launch.failure import (
    Record,
    cause,
    cause_text,
    first_to_end,
    how_it_ended,
    last_seen,
    read_records,
)
from flopwright.executor.launch.progress import progress_writer


def record(rank: int, time_s: float, message: str, **more: Any) -> Record:
    return {
        "rank": rank,
        "time_s": time_s,
        "type": "ValueError",
        "message": message,
        "violations": [],
        **more,
    }


def test_the_earliest_rank_is_believed_unless_the_input_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    lost = record(0, 12.0, "Connection closed by peer")
    first = record(3, 11.0, "the seal is broken")
    for r in (lost, first):
        path = tmp_path / "errors" / f"rank-{r['rank']:05d}.json"
        path.write_text(json.dumps(r))
    records = read_records(tmp_path)
    assert records == [lost, first]
    assert cause_text(cause(records)) == "rank 3 failed: ValueError: the seal is broken"
    early_loss = record(2, 9.0, "[127.0.0.1]:9650: Connection reset by peer")
    assert cause([early_loss, first]) == first
    assert "killed, or out of memory?" in cause_text(cause([early_loss, lost]))
    invalid = record(1, 13.0, "a: too big\nb: too small", violations=[{}, {}])
    assert cause_text(cause([*records, invalid])).splitlines() == [
        "2 problems with the input:",
        "  a: too big",
        "  b: too small",
    ]


def test_where_a_run_was_is_said_for_a_rank_that_no_longer_can(tmp_path: Path) -> None:
    assert last_seen(tmp_path) == ""
    say = progress_writer(tmp_path / "progress.jsonl", lambda _: None)
    say({"phase": "train", "share": 0.0})
    assert last_seen(tmp_path) == ""
    say({"plan": "dp2", "step": 8, "steps": 28})
    say({"phase": "a note", "share": 0.0, "note": True})
    with (tmp_path / "progress.jsonl").open("a") as file:
        file.write('{"plan": "dp2", "st')  # it was killed while it wrote
    seen = last_seen(tmp_path)
    assert seen == "; plan 'dp2' was last heard of after 8 of 28 steps"
    lost = record(0, 12.0, "Connection closed by peer")
    assert cause_text(lost, seen) == (
        "a rank ended without a word (killed, or out of memory?); plan 'dp2' was last heard of "
        "after 8 of 28 steps; rank 0 noticed: Connection closed by peer"
    )
    assert cause_text(lost, seen, "rank 1 was killed by SIGKILL") == (
        "rank 1 was killed by SIGKILL; plan 'dp2' was last heard of after 8 of 28 steps; rank 0 "
        "noticed: Connection closed by peer"
    )
    assert cause_text(lost, "", "rank 0 ended with exit code 1").startswith("a rank ended")
    # a rank that raised says its step itself
    assert "last heard" not in cause_text(record(1, 1.0, "broken; in step 9 of plan 'dp2'"), seen)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (1, "ended with exit code 1"),
        (-9, "was killed by SIGKILL"),
        (-999, "was killed by signal 999"),
    ],
)
def test_how_a_process_ended(code: int, said: str) -> None:
    assert how_it_ended(code) == said


REPORT = """
Failures:
[1]:
  time      : 2026-11-30_13:33:00
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : 143 (pid: 41)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_13:32:59
  host      : localhost
  rank      : 13 (local_rank: 1)
  exitcode  : -9 (pid: 42)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 42
============================================================
"""


def test_the_rank_that_was_killed_is_found_in_torchruns_last_report() -> None:
    assert first_to_end(REPORT) == "rank 13 was killed by SIGKILL"
    earlier = REPORT.replace(": 13 (", ": 5 (")
    assert first_to_end(earlier + REPORT) == "rank 13 was killed by SIGKILL"
    failed = REPORT.replace("-9 ", "1 ")
    assert first_to_end(failed) == "rank 13 ended with exit code 1"
    # seen at one look, the killed rank is the first
    swapped = failed.replace("143 ", "-9 ")
    assert first_to_end(swapped) == "rank 0 was killed by SIGKILL"
    assert first_to_end("") == first_to_end("torchrun had no time to report") == ""


@pytest.mark.parametrize("name", ["steps.jsonl", "measurement-a.json", "checkpoint-a"])
def test_a_folder_with_a_run_is_refused_and_one_with_logs_is_not(
    name: str, tmp_path: Path
) -> None:
    assert not run_folder_rules(tmp_path / "new")
    for folder in ("logs", "errors", "data"):
        (tmp_path / folder).mkdir()
    assert not run_folder_rules(tmp_path)
    (tmp_path / name).touch()
    (found,) = run_folder_rules(tmp_path)
    assert name in str(found)
    (at_a_file,) = run_folder_rules(tmp_path / name)
    assert "not an empty folder" in str(at_a_file)
