"""A search's state as the result that is printed, drawn and written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from flopwright.planner.rollouts.best_first import front_of
from flopwright.planner.rollouts.descent import Covered
from flopwright.planner.rollouts.known import Known, ranked_of
from flopwright.planner.rollouts.outcome import binding, words
from flopwright.planner.rollouts.plans import loop_plan
from flopwright.planner.rollouts.result import Coverage, InfeasibleLoop, LoopResult, RankedLoop
from flopwright.planner.rollouts.simulated import Fidelity

_TOLD: Final = 12
_OVERRUN: Final = 1.5  # times the limit, for what binds the best


def result_of(
    known: Known, covered: Covered | None, top_k: int, seconds: float, *, refined: bool = True
) -> LoopResult:
    """Returns what a search found.

    Args:
        covered: of a search from coarse to fine; None where the whole grid was searched.
        refined: values between the best one's neighbours were tried, as far as asked for.
    """
    order = ranked_of(known.reached)
    binds: dict[str, float] = {}
    if order:
        top, found = known.candidates[order[0]], known.outcomes[order[0]]
        fidelity = Fidelity(known.rounds)
        binds = binding(known.loop, top, found, fidelity, known.sims, _overrun(known))
    best = known.reached[order[0]].value if order else 0.0
    return LoopResult(
        scenario=known.loop.name,
        seed=known.sims.seed,
        objective=known.loop.objective,
        candidates=len(known.numbers) if covered is None else covered.space,
        simulated=len(known.reached),
        ruled_out=len(known.ruled_out),
        left=len(known.left) if covered is None else 0,
        seconds=seconds,
        refined=refined,
        unpriced=known.unpriced,
        coverage=None if covered is None else _coverage(covered, best),
        ranked=tuple(_ranked(known, i, binds if i == order[0] else {}) for i in order[:top_k]),
        front=tuple(_ranked(known, i, {}) for i in front_of(known.reached)),
        infeasible=_told(known, best),
        binds=binds,
        assumptions=_assumptions(known, order[:1]),
    )


def _overrun(known: Known) -> Callable[[], bool]:
    """Returns the question whether what follows the search has had half of its time again."""
    limit = known.time_limit_s
    return lambda: limit is not None and time.monotonic() - known.started_s > _OVERRUN * limit


def _coverage(covered: Covered, best: float) -> Coverage:
    return Coverage(
        structures=covered.structures,
        unbounded=covered.unbounded,
        bounded=covered.bounded,
        screened=covered.screened,
        settled=covered.settled,
        timed_out=covered.timed_out,
        unfinished=covered.unfinished,
        gap=max(0.0, covered.most / best - 1) if best else 0.0,
    )


def _ranked(known: Known, number: int, binds: dict[str, float]) -> RankedLoop:
    made, found = known.candidates[number], known.outcomes[number]
    assert made.scenario is not None
    served_by = known.engines[made.choice.shape]
    return RankedLoop(
        words=words(made.choice),
        plan=loop_plan(known.loop, made, found, binds, known.sims.seed),
        outcome=found,
        scenario=made.scenario,
        kv_capacity_tokens=None if served_by is None else served_by.engine.kv_capacity_tokens,
    )


def _told(known: Known, best: float) -> tuple[InfeasibleLoop, ...]:
    """Returns what does not fit: one of each rule first, then by what it could have reached."""
    ordered = sorted(known.infeasible, key=lambda entry: -entry[1])
    if best:
        ordered = [e for e in ordered if not e[1] or e[1] >= best * (1 - 1e-9)]
    # Choices that break the same rules with the same values say it once, the fastest of them.
    told: dict[tuple[str, ...], int] = {}
    for place, (_, _, broken) in enumerate(ordered):
        told.setdefault(tuple(f"{v.field} {v.value}" for v in broken), place)
    places = sorted(told.values())
    first = {ordered[i][2][0].field: i for i in reversed(places)}
    leading = sorted(first.values())
    rest = [i for i in places if i not in set(leading)]
    return tuple(
        InfeasibleLoop(words=name, most_attempts_per_s=most, violations=broken)
        for name, most, broken in (ordered[i] for i in [*leading, *rest][:_TOLD])
    )


def _assumptions(known: Known, order: Sequence[int]) -> tuple[str, ...]:
    texts: list[str] = []
    for number in order:
        report = known.outcomes[number].report
        texts += () if report is None else report.assumptions
        texts += known.candidates[number].update.assumptions
    texts += [
        f"{name}: {text}"
        for name, text in {**known.loop.rollout.sources, **known.loop.sources}.items()
        if text.startswith("assumed")
    ]
    return tuple(dict.fromkeys(texts))
