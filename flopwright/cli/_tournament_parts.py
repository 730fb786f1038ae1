"""What the stages of a tournament share: its options, its folder's files, who may race."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from flopwright.cli._tournament_state import HEAT, RACE, State, save_state
from flopwright.errors import InputError
from flopwright.executor.launch.checks import machine_rules
from flopwright.executor.launch.machine import find_machine
from flopwright.executor.launch.progress import Progress
from flopwright.executor.launch.supported import unsupported
from flopwright.executor.launch.tournament import TrialTurn, read_turns
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.planner.tournament import Contender, Field, new_field, twin_of
from flopwright.planner.tournament_result import TournamentResult, result_of
from flopwright.planner.tournament_times import TurnTime
from flopwright.report.metrics import Measurement
from flopwright.spec.load import dump_yaml, make_plan_file
from flopwright.spec.scenario import Scenario

if TYPE_CHECKING:
    from flopwright.store import Store

PLANS: Final = "plans"
# Launches of the race count from here on: they are others than the heat's.
RACE_LAUNCHES: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user said; `store` None keeps nothing, "" is the local store."""

    budget_s: float
    timeout_s: float
    top: int
    random: int
    calibration: str | None
    probe_s: float
    steps_per_turn: int
    nproc: int | None
    text: Path | None
    tokenizer: Literal["bpe", "characters"]
    seed: int
    store: str | None


@dataclass(slots=True)
class Tourney:
    """A tournament under way."""

    scenario: Scenario
    folder: Path
    options: Options
    state: State
    show: Progress
    store: Store | None

    def save(self, **changes: object) -> None:
        """Writes the state with changes."""
        self.state = self.state.model_copy(update=changes)
        save_state(self.folder, self.state)


def turn_time(turn: TrialTurn, shift: int = 0) -> TurnTime:
    return TurnTime(
        launch=turn.launch + shift, round=turn.round, plan=turn.plan, step_s=turn.step_s
    )


def all_turns(tourney: Tourney) -> list[TurnTime]:
    """Returns the turns of heat and race, whose launches are others than the heat's."""
    heat = [turn_time(t) for t in read_turns(tourney.folder / HEAT)]
    return [*heat, *(turn_time(t, RACE_LAUNCHES) for t in read_turns(tourney.folder / RACE))]


def measurements_in(folder: Path) -> list[Measurement]:
    """Returns the measurements that launches in a folder left."""
    return [
        Measurement.model_validate(json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(folder.glob("*/measurement-*.json"))
    ]


def longest_runs(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Returns one run a plan, the one with most steps: a heat that was stopped ran twice."""
    best: dict[str, Measurement] = {}
    for m in sorted(measurements, key=lambda m: len(m.step_time_samples_s)):
        best[m.plan_name] = m
    return list(best.values())


def field_of(tourney: Tourney) -> Field:
    field = new_field(tourney.scenario, refusal_of(tourney.scenario), tourney.state.contenders)
    field.refused.extend(tourney.state.refused)
    return field


def refusal_of(scenario: Scenario) -> Callable[[ParallelPlan], str]:
    """Returns what says why the executor does not run a plan, "" where it does."""

    def refusal(plan: ParallelPlan) -> str:
        if plan.world_size != scenario.cluster.num_gpus:
            return f"it is for {plan.world_size} ranks, and the others for all of them"
        broken = [*plan_violations(plan, scenario)]
        broken = broken or unsupported(make_plan_file(scenario, plan, "plan"))
        return "; ".join(str(v) for v in broken)

    return refusal


def plan_files(tourney: Tourney, names: Sequence[str]) -> dict[str, Path]:
    """Writes the plans and returns their files by the names of their results."""
    folder = tourney.folder / PLANS
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, Contender] = {}
    for contender in tourney.state.contenders:
        known[contender.name] = known[twin_of(contender.name)] = contender
    paths = {}
    for name in names:
        contender = known[name]
        path = folder / f"{contender.name}.yaml"
        if not path.exists():
            record = make_plan_file(tourney.scenario, contender.plan, contender.name)
            path.write_text(dump_yaml(record, "written by flopwright tournament"))
        paths[name] = path
    return paths


def check_machine(tourney: Tourney) -> None:
    """Refuses a scenario that this machine cannot run, before anything is written."""
    scenario = tourney.scenario
    plan = ParallelPlan(dp_shard=scenario.cluster.num_gpus)
    record = make_plan_file(scenario, plan, scenario.name)
    found = machine_rules(record, tourney.options.nproc, find_machine())
    if found:
        raise InputError(found)


def result_so_far(tourney: Tourney, *, finished: bool) -> TournamentResult | None:
    state = tourney.state
    turns = all_turns(tourney)
    raced = {t.plan for t in turns if t.launch > RACE_LAUNCHES}
    if not {state.chosen, state.uncalibrated} <= raced:
        return None
    return result_of(
        state.contenders,
        turns,
        scenario=state.asked.scenario,
        seed=state.asked.seed,
        chosen=state.chosen,
        uncalibrated=state.uncalibrated,
        calibration_id=state.learnt,
        left=state.left,
        refused=state.refused,
        finished=finished,
    )


def machine_of(folder: Path) -> str:
    """Returns the processor and cores of the newest measurement, "" without one."""
    found = measurements_in(folder / RACE) or measurements_in(folder / HEAT)
    if not found:
        return ""
    where = max(found, key=lambda m: m.created).fingerprint
    return f"{where.gpu or where.processor}, {where.num_cores} cores"
