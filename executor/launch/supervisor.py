"""Starts a run again that failed, and under a smaller plan where its ranks are lost.

A run that ends because a rank failed goes on from its last checkpoint. Starts that get no further
than the one before are counted; a new checkpoint forgives them. Once they are used up, or the
machine has fewer processors than the plan needs, the ranks count as lost, and the largest
fallback plan that the machine can hold goes on in the plan's place: the same model, batch and
steps on fewer ranks. What was wrong with the input is not tried again. Imports no torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.executor.launch.checks import LaunchOptions
from flopwright.executor.launch.local import RunFailedError, RunResult, launch
from flopwright.executor.launch.machine import Machine, find_machine
from flopwright.executor.launch.progress import Progress, note
from flopwright.executor.launch.request import REQUEST_FILE, RunRequest, read_request
from flopwright.executor.launch.resume import resume_step
from flopwright.plan.file import PlanFile
from flopwright.spec.load import dump_yaml, load_plan
from flopwright.units import plural, show_percent, show_seconds

RESTARTS_FILE: Final = "restarts.jsonl"
_LONGEST_PAUSE_S: Final = 60.0

Plans = Sequence[str | Path]
Launch = Callable[[Plans, str | Path, LaunchOptions, Progress | None], RunResult]
# From the plan whose ranks are lost: plans for fewer ranks, the largest first.
Fallbacks = Callable[[PlanFile], Sequence[PlanFile]]


StepTime = Callable[[PlanFile], float | None]


def step_time_told(plan: PlanFile) -> float | None:
    """Returns the step time that stands in a plan file."""
    return None if plan.predicted is None else plan.predicted.step_time_s


def no_fallbacks(plan: PlanFile) -> Sequence[PlanFile]:
    """Returns no plan: a run whose ranks are lost ends."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """How a run that failed goes on.

    Attributes:
        max_restarts: starts in a row that may get no further than the one before.
        fallbacks: asked for smaller plans when ranks are lost.
        step_time_s: predicts a plan's step; None where it cannot.
        machine: asked after each failure what is left.
        pause: waits so many seconds.
    """

    max_restarts: int = 0
    fallbacks: Fallbacks = no_fallbacks
    step_time_s: StepTime = step_time_told
    machine: Callable[[], Machine] = find_machine
    pause: Callable[[float], None] = time.sleep
    launch_one: Launch = launch

    def __call__(
        self,
        plans: Plans,
        out_dir: str | Path,
        options: LaunchOptions,
        on_progress: Progress | None = None,
    ) -> RunResult:
        """Launches a run as `launch` does, and starts it again where that helps.

        Raises:
            InputError: as `launch`; also where the fallback plans are for something else.
            RunFailedError: it failed, and neither another start nor a smaller plan is left.
        """
        if self.max_restarts == 0 and self.fallbacks is no_fallbacks:
            return self.launch_one(plans, out_dir, options, on_progress)
        run = _Supervised(self, Path(out_dir), on_progress or (lambda _: None), options, plans)
        return run.to_its_end()


@dataclass(slots=True)
class _Supervised:
    """One run, over all its starts."""

    how: Supervision
    out_dir: Path
    show: Progress
    options: LaunchOptions
    plans: Plans
    reached: int = 0  # steps of the checkpoint that the last start began with
    failures: int = 0  # in a row, without a new checkpoint

    def to_its_end(self) -> RunResult:
        """Launches until the run has come to its end, or nothing is left to try."""
        while True:
            try:
                return self.how.launch_one(self.plans, self.out_dir, self.options, self.show)
            except RunFailedError as error:
                self._after(error)

    def _after(self, error: RunFailedError) -> None:
        """Decides how to go on after a failure, and says so.

        Raises:
            RunFailedError: not at all.
        """
        request = self._request(error)
        at = resume_step(self.out_dir, request)
        self.failures = 1 if at > self.reached else self.failures + 1
        self.reached = max(self.reached, at)
        plan = request.entries[0].plan
        cause = str(error).splitlines()[0]
        lacking = _lacking(plan, self.options, self.how.machine())
        if not lacking and self.failures <= self.how.max_restarts:
            self._again(cause, at)
        else:
            self._smaller(error, plan, lacking, at, request)
        self.options = replace(self.options, resume=True)

    def _request(self, error: RunFailedError) -> RunRequest:
        path = self.out_dir / REQUEST_FILE
        if not path.is_file():  # it did not come so far as to say what it runs
            raise error
        return read_request(path)

    def _again(self, cause: str, at: int) -> None:
        text = (
            f"{cause}. Starting again from {_place(at)} (restart {self.failures} of "
            f"{self.how.max_restarts} without a new checkpoint)"
        )
        self._tell(text, {"cause": cause, "from_step": at, "restart": self.failures})
        if self.failures > 1:
            self.how.pause(min(_LONGEST_PAUSE_S, 2.0**self.failures))

    def _smaller(
        self, error: RunFailedError, plan: PlanFile, lacking: str, at: int, request: RunRequest
    ) -> None:
        cause = str(error).splitlines()[0]
        why = lacking or (
            f"it failed {plural(self.failures, 'time')} without a new checkpoint: ranks of plan "
            f"'{plan.name}' count as lost"
        )
        chosen = self._fallback(plan, request)
        if chosen is None:
            raise RunFailedError(f"{error}\n{why}, and no plan for fewer ranks is left") from error
        path = self.out_dir / f"fallback-{chosen.parallel.world_size}.yaml"
        path.write_text(dump_yaml(chosen), encoding="utf-8")
        cost = cost_of(plan, chosen, request.steps - at, self.how.step_time_s)
        text = f"{cause}. {why}. Going on from {_place(at)} under '{chosen.name}' on {cost.text}"
        self._tell(text, {"cause": cause, "lost": why, "from_step": at, **cost.data})
        ranks = chosen.parallel.world_size
        nproc = None if self.options.nproc is None else ranks
        self.plans, self.failures = [path], 0
        self.options = replace(self.options, nproc=nproc)

    def _fallback(self, plan: PlanFile, request: RunRequest) -> PlanFile | None:
        """Returns the largest plan for fewer ranks that the machine holds."""
        if len(request.entries) > 1:  # plans that are compared are not replaced
            return None
        found = [p for p in self.how.fallbacks(plan) if p.parallel.world_size < _ranks(plan)]
        refuse_other_runs(plan, found)
        machine = self.how.machine()
        fits = [p for p in found if not _lacking(p, self.options, machine)]
        return max(fits, key=_ranks, default=None)

    def _tell(self, text: str, data: dict[str, Any]) -> None:
        line = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **data}
        with (self.out_dir / RESTARTS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.show(note(text))


@dataclass(frozen=True, slots=True)
class Cost:
    """What going on with fewer ranks costs, in words and as data (SI units)."""

    text: str
    data: dict[str, Any]


def cost_of(
    plan: PlanFile, smaller: PlanFile, steps_left: int, step_time_s: StepTime = step_time_told
) -> Cost:
    """Returns what going on under another plan costs, by the predicted step times of both."""
    ranks, left = _ranks(smaller), _ranks(plan)
    text = f"{plural(ranks, 'rank')} of {left}, the same global batch"
    data: dict[str, Any] = {"plan": smaller.name, "ranks": ranks, "ranks_before": left}
    before, after = step_time_s(plan), step_time_s(smaller)
    if before is None or after is None:
        return Cost(f"{text}; what it costs is not predicted in the plan files", data)
    text += (
        f"; predicted step {show_seconds(after)} instead of {show_seconds(before)} "
        f"({show_percent(after / before - 1)} longer): {show_seconds(steps_left * after)} for the "
        f"{plural(steps_left, 'step')} left instead of {show_seconds(steps_left * before)}"
    )
    data |= {"step_time_s": after, "step_time_before_s": before, "steps_left": steps_left}
    return Cost(text, data)


def given_fallbacks(paths: Sequence[Path], plan: PlanFile) -> Fallbacks:
    """Returns the plans of files as fallbacks of a plan.

    Raises:
        InputError: one is for another model or workload, or for no fewer ranks.
    """
    found = tuple(load_plan(path) for path in paths)
    refuse_other_runs(plan, found)
    large = [
        Violation(
            field="--fallback",
            value=str(path),
            rule=f"is for {plural(_ranks(p), 'rank')}, and the plan for {_ranks(plan)}",
            nearest_fix="a fallback is for fewer",
        )
        for path, p in zip(paths, found, strict=True)
        if _ranks(p) >= _ranks(plan)
    ]
    if large:
        raise InputError(large)
    return lambda _: found


def refuse_other_runs(plan: PlanFile, found: Sequence[PlanFile]) -> None:
    """Raises InputError where a fallback would train something else than the plan."""
    mine, wrong = plan.scenario, []
    for other in found:
        theirs = other.scenario
        for what, a, b in (
            ("model", mine.model.content_hash(), theirs.model.content_hash()),
            ("workload", mine.workload.content_hash(), theirs.workload.content_hash()),
        ):
            if a != b:
                rule = f"the fallback plan is for another {what} than '{plan.name}'"
                wrong.append(Violation(field=what, value=other.name, rule=rule))
    if wrong:
        raise InputError(wrong)


def _lacking(plan: PlanFile, options: LaunchOptions, machine: Machine) -> str:
    """Returns what the machine lacks for a plan; "" where it has all."""
    shared = options.nproc is not None and not machine.gpus  # ranks that share cores
    needed, there = _ranks(plan), machine.gpus or machine.cores
    if shared or there >= needed:
        return ""
    return f"this machine has {machine.describe()} left and plan '{plan.name}' needs {needed}"


def _ranks(plan: PlanFile) -> int:
    return plan.parallel.world_size


def _place(step: int) -> str:
    return f"the checkpoint of {plural(step, 'step')}" if step else "the beginning"
