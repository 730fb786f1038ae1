"""A tournament's outcome: how far the planner's choice is from the measured best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from flopwright.planner.tournament import Contender, Origin, Refused, twin_of
from flopwright.planner.tournament_times import (
    TurnTime,
    kept_turns,
    launch_scatter,
    paired_times,
)
from flopwright.spec.base import Spec


class PlanRow(Spec):
    """One plan of the race.

    Attributes:
        measured_step_s: at the pace of the middle round; +- measured_log_std (log).
        behind: how much longer its step takes than the fastest plan's, as a share.
        predicted_step_s: by the calibration, which has not seen this plan.
        prior_step_s: by the public prior, uncalibrated.
        turns: turns that count.
        left: why it left the race early, "" where it did not.
    """

    name: str
    label: str
    origins: tuple[Origin, ...]
    measured_step_s: PositiveFloat
    measured_log_std: NonNegativeFloat
    behind: NonNegativeFloat
    predicted_step_s: PositiveFloat
    prior_step_s: PositiveFloat
    turns: int
    left: str = ""


class Judged(Spec):
    """How good one way to choose was.

    Attributes:
        regret: measured(chosen) / measured(best) - 1.
        spearman: rank correlation of predicted and measured step times over all plans.
        median_error: median over plans of |predicted / measured - 1|.
    """

    chosen: str
    regret: NonNegativeFloat
    spearman: float
    median_error: NonNegativeFloat


class TournamentResult(Spec):
    """The outcome.

    Attributes:
        regret, spearman, chosen: of the planner with the calibration; the chosen plan's time is
            that of both its entries. The best is among those that raced to the end: who left
            early was slower beyond doubt, or had too few turns to be told from its luck.
        noise_floor: how far one plan's time under two names differs: over all launches, or what
            its differences in each launch make one expect of their mean, if that is more. None
            without a twin.
        regret_crossed: the same regret when the best is picked in all launches but one and
            compared in that one, the mean over launches: without the luck of being picked. Of
            one launch, picked in half of its rounds and compared in the other half, which
            leaves the launch's own luck in. None where there are too few rounds.
        regret_log_std: standard deviation of log(1 + regret) from how turns scatter and from
            how far launches move plans.
        launch_log: how far a launch moves a plan, as the launches showed it (log).
        uncalibrated: of the planner with the public prior alone.
        calibrated: of the planner with the calibration, as `uncalibrated`.
        calibration_id: what the choice was made with; it has not seen the chosen plan.
        plans: fastest first.
        refused: plans that could not run, and trials that failed.
        rounds: rounds that count, over all launches.
        finished: False where it was ended before its time.
    """

    scenario: str
    seed: int
    chosen: str
    best: str
    regret: NonNegativeFloat
    spearman: float
    noise_floor: NonNegativeFloat | None = None
    regret_crossed: float | None = None
    regret_log_std: NonNegativeFloat
    uncalibrated: Judged
    calibrated: Judged
    calibration_id: str
    plans: tuple[PlanRow, ...]
    refused: tuple[Refused, ...] = ()
    rounds: int
    scatter_log: NonNegativeFloat
    launch_log: NonNegativeFloat = 0.0
    finished: bool

    @property
    def good(self) -> bool:
        """Whether the choice is within 5 % of the best, or within the noise."""
        return self.regret <= max(0.05, self.noise_floor or 0.0)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the rank correlation of two columns, equal values sharing their mean rank.

    It is 0 where a column holds one value only: then nothing was ranked.
    """
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(), y - y.mean()
    size = math.sqrt(float((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / size if size > 0 else 0.0


def _ranks(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse], np.float64)


def result_of(
    contenders: Sequence[Contender],
    turns: Sequence[TurnTime],
    *,
    scenario: str,
    seed: int,
    chosen: str,
    uncalibrated: str,
    calibration_id: str,
    left: Mapping[str, str],
    refused: Sequence[Refused],
    finished: bool,
) -> TournamentResult:
    """Returns the outcome of the turns.

    Args:
        contenders: priced; those without a turn are left out.
        turns: of all launches, warm-up among them; the chosen plan's twin too.
        chosen, uncalibrated: names of what the planner takes with and without calibration.
        left: why plans left the race early.
    """
    kept = kept_turns(turns)
    twin = (chosen, twin_of(chosen))
    launch_log = launch_scatter(kept, twin)
    times = paired_times(kept, launch_log, twin)
    raced = [c for c in contenders if c.name in times.plans]
    names = _contending([c.name for c in raced], left, chosen, uncalibrated)
    best = times.fastest(names)
    rows = [
        PlanRow(
            name=c.name,
            label=c.plan.label(),
            origins=c.origins,
            measured_step_s=times.plans[c.name].step_s,
            measured_log_std=times.plans[c.name].log_std,
            behind=max(0.0, times.ratio(c.name, best) - 1.0),
            predicted_step_s=c.predicted_step_s or c.prior_step_s,
            prior_step_s=c.prior_step_s,
            turns=times.plans[c.name].turns,
            left=left.get(c.name, ""),
        )
        for c in raced
    ]
    rows.sort(key=lambda r: r.measured_step_s)
    calibrated = _judged(rows, chosen, [r.predicted_step_s for r in rows])
    return TournamentResult(
        scenario=scenario,
        seed=seed,
        chosen=chosen,
        best=best,
        regret=calibrated.regret,
        spearman=calibrated.spearman,
        noise_floor=_floor(kept, chosen),
        regret_crossed=_crossed(kept, names, chosen, launch_log),
        regret_log_std=0.0 if chosen == best else times.ratio_log_std(chosen, best),
        uncalibrated=_judged(rows, uncalibrated, [r.prior_step_s for r in rows]),
        calibrated=calibrated,
        calibration_id=calibration_id,
        plans=tuple(rows),
        refused=tuple(refused),
        rounds=len({(t.launch, t.round) for t in kept}),
        scatter_log=times.scatter_log,
        launch_log=launch_log,
        finished=finished,
    )


def _contending(
    names: Sequence[str], left: Mapping[str, str], chosen: str, uncalibrated: str
) -> list[str]:
    """Returns who raced to the end."""
    return [n for n in names if n not in left or n in {chosen, uncalibrated}]


def _floor(kept: Sequence[TurnTime], chosen: str) -> float | None:
    """Returns how far the chosen plan's two entries differ, as a share.

    A process that starts anew lays its memory out anew, and one plan may be faster in it than
    its twin for as long as it lives. So what counts is the mean over launches; of few of
    them it may be small by luck, and then what their differences make one expect counts.
    """
    twin, logs = twin_of(chosen), []
    for launch in dict.fromkeys(t.launch for t in kept):
        times = paired_times([t for t in kept if t.launch == launch])
        if {twin, chosen} <= set(times.plans):
            logs.append(math.log(times.ratio(twin, chosen)))
    if not logs:
        return None
    expected = math.sqrt(sum(x**2 for x in logs) / len(logs)) / math.sqrt(len(logs))
    return math.expm1(max(abs(sum(logs) / len(logs)), expected))


def _judged(rows: Sequence[PlanRow], chosen: str, predicted_s: Sequence[float]) -> Judged:
    measured = [r.measured_step_s for r in rows]
    (own,) = (r.behind for r in rows if r.name == chosen)
    errors = np.abs(np.array(predicted_s) / np.array(measured) - 1.0)
    return Judged(
        chosen=chosen,
        regret=own,
        spearman=spearman(predicted_s, measured),
        median_error=float(np.median(errors)),
    )


def _crossed(
    kept: Sequence[TurnTime], names: Sequence[str], chosen: str, launch_log: float
) -> float | None:
    """Returns the mean over parts of the regret there against the best of all other parts.

    Parts are the launches that the chosen plan ran in; of one launch, its alternate rounds.
    """
    twin = (chosen, twin_of(chosen))
    found = []
    parts = _parts(kept, chosen)
    for part in parts:
        rest = [t for t in kept if t not in part]
        if len(parts) < 2 or not part or not rest:
            return None
        here, there = paired_times(rest, launch_log, twin), paired_times(list(part), 0.0, twin)
        both = [n for n in names if n in here.plans and n in there.plans]
        if chosen not in both:
            return None
        found.append(there.ratio(chosen, here.fastest(both)) - 1.0)
    return sum(found) / len(found) if found else None


def _parts(kept: Sequence[TurnTime], chosen: str) -> list[frozenset[TurnTime]]:
    """Returns the turns by launch; of one launch the halves of its rounds, two rounds each."""
    launches = list(dict.fromkeys(t.launch for t in kept if t.plan == chosen))
    if len(launches) > 1:
        return [frozenset(t for t in kept if t.launch == n) for n in launches]
    rounds = list(dict.fromkeys((t.launch, t.round) for t in kept))
    halves = [set(rounds[0::2]), set(rounds[1::2])]
    if min(len(h) for h in halves) < 2:
        return []
    return [frozenset(t for t in kept if (t.launch, t.round) in h) for h in halves]
