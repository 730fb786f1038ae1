"""Short interleaved trials of many plans: who leaves early is decided from outside, turn by turn.

One launch runs all plans in turns. After each turn a referee sees all times so far and may
retire plans or end the launch. A plan whose trial fails is left out with the reason, and the
others go on in another launch. Imports no torch.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from flopwright.executor.launch.checks import LaunchOptions
from flopwright.executor.launch.local import RunFailedError, RunResult, launch
from flopwright.executor.launch.processes import STOPPING
from flopwright.executor.launch.progress import Progress
from flopwright.executor.launch.request import (
    RETIRED_FILE,
    STEPS_FILE,
    STOP_FILE,
    write_json,
)
from flopwright.report.metrics import Measurement
from flopwright.report.probe import ProbeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTurn:
    """One plan's turn: the median of its timed steps, in seconds."""

    launch: int
    round: int
    plan: str
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What a referee says: who takes no more turns and why, and whether all is over."""

    retired: Mapping[str, str]
    stop: bool


# From a launch's turns, who has retired, and seconds since the launch began.
Referee = Callable[[Sequence[TrialTurn], Mapping[str, str], float], Ruling]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """What trials showed.

    Attributes:
        turns: of all launches, failed ones too.
        measurements: by name; of plans whose launch came to its end.
        retired: who left early, and why.
        failed: whose trial failed, and why.
        interrupted: whether the user asked to stop.
    """

    turns: tuple[TrialTurn, ...]
    measurements: Mapping[str, Measurement]
    retired: Mapping[str, str]
    failed: Mapping[str, str]
    probe: ProbeReport | None
    interrupted: bool


def run_trials(
    plans: Mapping[str, Path],
    folder: Path,
    options: LaunchOptions,
    referee: Referee,
    on_progress: Progress,
) -> Trials:
    """Runs all plans in turns until the referee ends it.

    Args:
        plans: plan files by the names their results get.
        folder: launches are written to its folders 1, 2, ...; those there already stay.
        options: of every launch; names, checkpoints and silence are set here.
        referee: asked after every turn.

    Raises:
        InputError: a plan cannot run here.
        RunFailedError: a launch failed and no plan is to blame.
    """
    left, failed = dict(plans), dict[str, str]()
    while True:
        number = next_launch(folder)
        watcher = _Watcher(folder / str(number), number, tuple(left), referee, on_progress)
        try:
            result = _launch(left, folder / str(number), options, watcher)
        except RunFailedError as error:
            guilty = culprit(str(error), watcher, tuple(left))
            if guilty is None or len(left) == 1:
                raise
            failed[guilty] = str(error).splitlines()[0]
            del left[guilty]
            continue
        return Trials(
            turns=read_turns(folder),
            measurements={m.plan_name: m for m in result.measurements},
            retired=watcher.retired,
            failed=failed,
            probe=result.probe,
            interrupted=watcher.interrupted(),
        )


def _launch(
    plans: Mapping[str, Path], out_dir: Path, options: LaunchOptions, watcher: _Watcher
) -> RunResult:
    chosen = replace(options, names=tuple(plans), checkpoints=False)
    return launch(list(plans.values()), out_dir, chosen, watcher.see)


@dataclass(slots=True)
class _Watcher:
    """Sees a launch's progress, asks the referee and passes its word to the ranks."""

    out_dir: Path
    number: int
    names: tuple[str, ...]
    referee: Referee
    show: Progress
    retired: dict[str, str] = field(default_factory=dict)
    training: bool = False
    last: str | None = None
    stopped: bool = False
    asked: bool = False
    began: float = field(default_factory=time.monotonic)

    def see(self, event: dict[str, Any]) -> None:
        """Takes a line of progress; after a plan's turn the referee is asked."""
        self.show(event)
        self.training = self.training or event.get("phase") == "train"
        self.asked = self.asked or event.get("phase") == STOPPING
        if "plan" not in event or self.stopped:
            return
        self.last = event["plan"]
        ruling = self.referee(
            launch_turns(self.out_dir, self.number), self.retired, time.monotonic() - self.began
        )
        fresh = {n: why for n, why in ruling.retired.items() if n not in self.retired}
        if fresh:
            self.retired |= fresh
            write_json(self.out_dir / RETIRED_FILE, sorted(self.retired))
        if ruling.stop and not (self.out_dir / STOP_FILE).exists():
            self.stopped = True
            (self.out_dir / STOP_FILE).touch()

    def interrupted(self) -> bool:
        """Returns whether someone asked to stop, whatever the referee said."""
        return self.asked or ((self.out_dir / STOP_FILE).exists() and not self.stopped)

    def at_work(self) -> str | None:
        """Returns the plan whose turn it is, None before the first one."""
        if not self.training:
            return None
        running = [n for n in self.names if n not in self.retired or n == self.last]
        if self.last is None:
            return running[0]
        return running[(running.index(self.last) + 1) % len(running)]


def culprit(message: str, watcher: _Watcher, names: Sequence[str]) -> str | None:
    """Returns the plan that a failure is about: named in its message, else whose turn it was."""
    named = [n for n in re.findall(r"plan '([^']+)'", message) if n in names]
    return named[0] if named else watcher.at_work()


def next_launch(folder: Path) -> int:
    """Returns the number of the next launch in a folder of launches."""
    return 1 + max((int(p.name) for p in folder.glob("[0-9]*")), default=0)


def read_turns(folder: Path) -> tuple[TrialTurn, ...]:
    """Returns the turns of all launches in a folder, in order."""
    numbers = sorted(int(p.name) for p in folder.glob("[0-9]*"))
    return tuple(t for n in numbers for t in launch_turns(folder / str(n), n))


def launch_turns(out_dir: Path, number: int) -> list[TrialTurn]:
    """Returns a launch's finished turns, in order; a line that is still being written waits."""
    path = out_dir / STEPS_FILE
    if not path.exists():
        return []
    steps: dict[tuple[int, str], list[tuple[bool, float]]] = {}
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        row = json.loads(line)
        steps.setdefault((row["round"], row["plan"]), []).append(
            (row["timed"], row["step_time_s"])
        )
    return [
        TrialTurn(
            launch=number,
            round=round_number,
            plan=plan,
            step_s=median([s for timed, s in rows if timed] or [s for _, s in rows]),
        )
        for (round_number, plan), rows in steps.items()
    ]
