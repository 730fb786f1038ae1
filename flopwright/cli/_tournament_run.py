"""The stages of `flopwright tournament`: a heat to learn from, the choice, the race."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flopwright.cli._tournament_parts import (
    RACE_LAUNCHES,
    Options,
    Tourney,
    all_turns,
    check_machine,
    field_of,
    longest_runs,
    machine_of,
    measurements_in,
    plan_files,
    result_so_far,
    turn_time,
)
from flopwright.cli._tournament_progress import progress_display
from flopwright.cli._tournament_state import (
    HEAT,
    RACE,
    Asked,
    load_state,
    save_result,
)
from flopwright.executor.launch.checks import LaunchOptions
from flopwright.executor.launch.tournament import (
    Ruling,
    Trials,
    TrialTurn,
    read_turns,
    run_trials,
)
from flopwright.planner.tournament import (
    Learnt,
    Refused,
    choice,
    draw_random,
    enter_best,
    learn,
    priced,
    prior_choice,
    twin_of,
)
from flopwright.planner.tournament_referee import (
    Rules,
    decide,
    leg_rules,
    legs_of,
    worth_racing,
)
from flopwright.planner.tournament_result import TournamentResult
from flopwright.simulator.calibration.files import load_calibration, save_calibration
from flopwright.simulator.calibration.fit_probe import fit_probe
from flopwright.simulator.calibration.model import Calibration
from flopwright.spec.load import load_scenario

if TYPE_CHECKING:
    from flopwright.store import Store

PROBE_CALIBRATION: Final = "probe.calibration.yaml"
LEARNT_CALIBRATION: Final = "calibration.yaml"
# Of the whole time, what the heat may take; and rounds of it (the first is the warm-up).
_HEAT_SHARE: Final = 0.4
_HEAT_ROUNDS: Final = 5
_RACE_ROUNDS: Final = 40
_MORE_STEPS: Final = 4000  # than any race makes: the referee ends it
_HELD_OUT_SEQUENCES: Final = 16
_LEAST_SILENCE_S: Final = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What there is to say: no result where it was stopped before the race had a round."""

    folder: Path
    result: TournamentResult | None
    finished: bool
    machine: str


def run_tournament(name: str, folder: Path, options: Options, *, quiet: bool) -> Outcome:
    """Runs what is left of a tournament and returns what is known then."""
    scenario = load_scenario(name)
    asked = Asked(
        scenario=scenario.name,
        scenario_hash=scenario.content_hash(),
        top=options.top,
        random=options.random,
        seed=options.seed,
        calibration=options.calibration,
        steps_per_turn=options.steps_per_turn,
    )
    state = load_state(folder, asked)
    store = _open_store(options.store)
    given = None if options.calibration is None else load_calibration(options.calibration)
    with progress_display(options.budget_s, state.spent_s, quiet=quiet) as show:
        tourney = Tourney(scenario, folder, options, state, show, store)
        finished = state.finished or _stages(tourney, given)
    result = result_so_far(tourney, finished=finished)
    if result is not None:
        save_result(folder, result)
    return Outcome(folder=folder, result=result, finished=finished, machine=machine_of(folder))


def _stages(tourney: Tourney, given: Calibration | None) -> bool:
    """Runs the stages that are left; returns whether the tournament came to its end."""
    if not tourney.state.heat_done and not _heat(tourney, learns=given is None):
        return False
    if not tourney.state.chosen:
        _choose(tourney, given)
    return _race(tourney)


def _heat(tourney: Tourney, *, learns: bool) -> bool:
    """Draws the random plans; where a calibration is to be learnt, runs them with a probe."""
    state, options = tourney.state, tourney.options
    field = field_of(tourney)
    if not state.contenders:
        check_machine(tourney)
        draw_random(field, options.random, options.seed)
        tourney.save(contenders=tuple(field.contenders), refused=tuple(field.refused))
    if learns and field.contenders:
        rules = Rules(
            names=tuple(c.name for c in field.contenders),
            stay=frozenset(c.name for c in field.contenders),
            budget_s=max(0.0, _HEAT_SHARE * options.budget_s - state.spent_s),
            timeout_s=options.timeout_s,
            max_rounds=_HEAT_ROUNDS,
            steps_per_turn=options.steps_per_turn,
        )
        if not _trials(tourney, HEAT, rules, probe=True):
            return False
    tourney.save(heat_done=True)
    return True


def _choose(tourney: Tourney, given: Calibration | None) -> None:
    """Learns from the heat, enters the best plans, and lets the planner choose."""
    learnt = _learnt(tourney, given)
    field = field_of(tourney)
    enter_best(field, learnt.calibration, tourney.options.top)
    enter_best(field, field.prior, 1, "prior")
    contenders = priced(field.contenders, tourney.scenario, learnt)
    chosen, uncalibrated = choice(contenders), prior_choice(contenders)
    # Plans that were drawn and nothing else; the planner's own race whatever they did before.
    drawn = [c.name for c in contenders if c.origins == ("random",) and c.name != chosen.name]
    heat = [turn_time(t) for t in read_turns(tourney.folder / HEAT)]
    tourney.save(
        left=worth_racing(drawn, heat),
        contenders=contenders,
        refused=tuple(field.refused),
        learnt=learnt.held_out(chosen.name).id,
        chosen=chosen.name,
        uncalibrated=uncalibrated.name,
    )


def _learnt(tourney: Tourney, given: Calibration | None) -> Learnt:
    """Returns the calibration to choose with; what was learnt here is written down."""
    if given is not None:
        return Learnt(calibration=given, without={})
    path = tourney.folder / PROBE_CALIBRATION
    base = load_calibration(path) if path.exists() else field_of(tourney).prior
    learnt = learn(base, longest_runs(measurements_in(tourney.folder / HEAT)))
    save_calibration(learnt.calibration, tourney.folder / LEARNT_CALIBRATION)
    return learnt


def _race(tourney: Tourney) -> bool:
    """Runs all contenders, the chosen one twice; returns whether the race came to its end.

    It has several launches: a process that starts anew lays its memory out anew, so that a
    plan that was lucky in one is not in all. Who leaves is decided with all that ran before.
    """
    state, options = tourney.state, tourney.options
    legs = legs_of(options.budget_s)
    for leg in range(state.legs, legs):
        gone = {r.name for r in tourney.state.refused} | set(tourney.state.left)
        rules = leg_rules(
            leg,
            legs,
            [c.name for c in state.contenders if c.name not in gone],
            chosen=state.chosen,
            twin=twin_of(state.chosen),
            stay=(state.uncalibrated,),
            left_s=max(0.0, options.budget_s - tourney.state.spent_s),
        )
        rules = replace(
            rules,
            timeout_s=options.timeout_s,
            max_rounds=_RACE_ROUNDS,
            steps_per_turn=options.steps_per_turn,
            earlier=tuple(all_turns(tourney)),
        )
        if not _trials(tourney, RACE, rules, probe=False):
            return False
        tourney.save(legs=leg + 1)
    tourney.save(finished=True)
    return True


def _trials(tourney: Tourney, stage: str, rules: Rules, *, probe: bool) -> bool:
    """Runs a stage's trials; returns False where the user stopped them."""
    began = time.monotonic()
    options = tourney.options
    launch_options = LaunchOptions(
        steps=_MORE_STEPS,
        steps_per_round=options.steps_per_turn,
        nproc=options.nproc,
        text=options.text,
        tokenizer=options.tokenizer,
        seed=options.seed,
        probe=probe and not (tourney.folder / PROBE_CALIBRATION).exists(),
        probe_budget_s=min(options.probe_s, 0.5 * rules.budget_s or 1.0),
        held_out_sequences=_HELD_OUT_SEQUENCES,
        collective_timeout_s=options.timeout_s,
        silence_s=max(_LEAST_SILENCE_S, 2 * options.timeout_s),
    )
    found: Trials | None = None
    try:
        found = run_trials(
            plan_files(tourney, rules.names),
            tourney.folder / stage,
            launch_options,
            _referee(rules, RACE_LAUNCHES if stage == RACE else 0),
            tourney.show,
        )
    finally:
        tourney.save(spent_s=tourney.state.spent_s + time.monotonic() - began)
    _keep(tourney, found)
    return not found.interrupted


def _referee(
    rules: Rules, shift: int
) -> Callable[[Sequence[TrialTurn], Mapping[str, str], float], Ruling]:
    def judge(turns: Sequence[TrialTurn], retired: Mapping[str, str], elapsed_s: float) -> Ruling:
        decision = decide(rules, [turn_time(t, shift) for t in turns], retired, elapsed_s)
        return Ruling(retired=decision.retired, stop=decision.stop)

    return judge


def _keep(tourney: Tourney, found: Trials) -> None:
    """Writes down what a stage showed: measurements to the store, curves to a file."""
    if tourney.store is not None:
        for measurement in found.measurements.values():
            tourney.store.add(measurement)
    if found.probe is not None:
        curves = fit_probe(found.probe)
        save_calibration(curves, tourney.folder / PROBE_CALIBRATION)
        save_calibration(curves)  # the user's own: `calibrate` starts from it
    failed = tuple(Refused(name=n, reason=why) for n, why in found.failed.items())
    tourney.save(
        refused=(*tourney.state.refused, *failed),
        left={**tourney.state.left, **found.retired},
    )


def _open_store(url: str | None) -> Store | None:
    """Returns the store, asked before anything runs whether it can be used."""
    from flopwright.store import open_store

    return None if url is None else open_store(url or None)
