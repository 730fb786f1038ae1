"""Trials of many plans: who is retired, who is blamed for a failure, what is read back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flopwright.executor.launch import tournament
from flopwright.executor.launch.checks import LaunchOptions
from flopwright.executor.launch.local import RunFailedError, RunResult
from flopwright.executor.launch.processes import STOPPING
from flopwright.executor.launch.request import RETIRED_FILE, STEPS_FILE, STOP_FILE, read_retired
from flopwright.executor.launch.tournament import (
    Ruling,
    TrialTurn,
    launch_turns,
    read_turns,
    run_trials,
)

SECONDS = {"a": 1.0, "b": 2.0, "c": 3.0}
PLANS = {name: Path(f"{name}.yaml") for name in SECONDS}


class FakeLaunch:
    """Stands for `launch`: makes turns until told to stop; some plans fail in their third step."""

    def __init__(self, failing: Mapping[str, str] | None = None) -> None:
        self.failing = failing or {}
        self.started: list[tuple[str, ...]] = []

    def __call__(
        self, plans: Sequence[Path], out: Path, options: LaunchOptions, see: Any
    ) -> RunResult:
        names = options.names
        self.started.append(names)
        assert not options.checkpoints
        out.mkdir(parents=True)
        see({"phase": "train", "share": 0.0})
        for number in range(50):
            if (out / STOP_FILE).exists():
                break
            retired = read_retired(out)
            for name in names:
                if name in retired:
                    continue
                if number == 1 and name in self.failing:
                    raise RunFailedError(self.failing[name])
                self._turn(out, number, name)
                see({"plan": name, "step": 2 * number + 2})
        nothing: Any = None  # nobody asks for it
        return RunResult(out_dir=out, request=nothing, measurements=(), checkpoints={})

    @staticmethod
    def _turn(out: Path, number: int, name: str) -> None:
        with (out / STEPS_FILE).open("a") as file:
            for step in range(2):
                row = {
                    "plan": name,
                    "step": 2 * number + step,
                    "round": number,
                    "step_time_s": SECONDS[name] + (50 if step == 0 and number == 0 else 0),
                    "timed": not (step == 0 and number == 0),
                }
                file.write(json.dumps(row) + "\n")


def stop_after(rounds: int, retire: Mapping[str, int] | None = None) -> Any:
    def referee(
        turns: Sequence[TrialTurn], retired: Mapping[str, str], elapsed_s: float
    ) -> Ruling:
        done = {n: sum(t.plan == n for t in turns) for n in SECONDS}
        gone = {n: "slow" for n, after in (retire or {}).items() if done[n] >= after}
        return Ruling(retired=gone, stop=max(done.values()) >= rounds)

    return referee


def trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeLaunch, referee: Any
) -> tournament.Trials:
    monkeypatch.setattr(tournament, "launch", fake)
    return run_trials(PLANS, tmp_path / "race", LaunchOptions(), referee, lambda _: None)


def test_turns_are_medians_of_timed_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trials(tmp_path, monkeypatch, FakeLaunch(), stop_after(3))
    assert [(t.round, t.plan, t.step_s) for t in found.turns] == [
        (r, n, s) for r in range(3) for n, s in SECONDS.items()
    ]
    assert not found.interrupted
    assert found.retired == found.failed == {}


def test_a_retired_plan_takes_no_turns_from_the_next_round_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trials(tmp_path, monkeypatch, FakeLaunch(), stop_after(5, {"c": 2}))
    assert sum(t.plan == "c" for t in found.turns) == 2
    assert sum(t.plan == "a" for t in found.turns) == 5
    assert found.retired == {"c": "slow"}
    assert json.loads((tmp_path / "race" / "1" / RETIRED_FILE).read_text()) == ["c"]


def test_a_plan_that_fails_is_left_out_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeLaunch({"b": "rank 1 failed: ValueError: no; in step 2 of plan 'b'\nmore"})
    found = trials(tmp_path, monkeypatch, fake, stop_after(3))
    assert fake.started == [("a", "b", "c"), ("a", "c")]
    assert found.failed == {"b": "rank 1 failed: ValueError: no; in step 2 of plan 'b'"}
    assert {t.launch for t in found.turns} == {1, 2}  # what the failed launch showed is kept
    assert sum(t.plan == "a" and t.launch == 2 for t in found.turns) == 3


def test_a_launch_that_ends_without_a_word_blames_whose_turn_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeLaunch({"c": "the run showed no progress for 60 s"})
    found = trials(tmp_path, monkeypatch, fake, stop_after(3))
    assert found.failed == {"c": "the run showed no progress for 60 s"}
    assert fake.started == [("a", "b", "c"), ("a", "b")]


def test_a_launch_that_fails_before_any_turn_is_nobodys_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> RunResult:
        raise RunFailedError("no space left on device")

    monkeypatch.setattr(tournament, "launch", broken)
    with pytest.raises(RunFailedError):
        run_trials(PLANS, tmp_path, LaunchOptions(), stop_after(1), lambda _: None)


def test_a_stop_from_outside_is_told_from_the_referees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, race = FakeLaunch(), tmp_path / "race" / "1"

    def never(turns: Sequence[TrialTurn], retired: Mapping[str, str], elapsed_s: float) -> Ruling:
        if len(turns) == 4:
            (race / STOP_FILE).touch()  # as Ctrl-C does
        return Ruling(retired={}, stop=False)

    found = trials(tmp_path, monkeypatch, fake, never)
    assert found.interrupted
    assert len(found.turns) == 6


def test_ctrl_c_counts_even_after_the_referees_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(FakeLaunch):
        def __call__(
            self, plans: Sequence[Path], out: Path, options: LaunchOptions, see: Any
        ) -> RunResult:
            result = super().__call__(plans, out, options, see)
            see({"phase": STOPPING, "share": 0})
            return result

    assert trials(tmp_path, monkeypatch, Interrupted(), stop_after(2)).interrupted


def test_launches_of_one_folder_are_read_together_and_half_a_line_waits(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        (tmp_path / str(number)).mkdir()
        FakeLaunch._turn(tmp_path / str(number), 0, "a")
    with (tmp_path / "10" / STEPS_FILE).open("a") as file:
        file.write('{"plan": "a", "ro')
    assert [t.launch for t in read_turns(tmp_path)] == [1, 2, 10]
    assert tournament.next_launch(tmp_path) == 11
    assert launch_turns(tmp_path / "3", 3) == []
