"""The search for an RL loop: split, instances, concurrency, lambda, pool and the update's plan.

Every choice of the grid is made complete (candidate.py) and bounded (bounds.py); those that
fit are simulated best first, until bounds rule out the rest (best_first.py); then values
between the best one's neighbours are tried on the axes that are continuous.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.planner.rollouts.best_first import (
    Explored,
    Progress,
    Reached,
    best_first,
    between,
    front_of,
)
from flopwright.planner.rollouts.bounds import Work, work_of
from flopwright.planner.rollouts.candidate import (
    Candidate,
    candidate,
    staleness_violation,
    update_gpus,
)
from flopwright.planner.rollouts.choices import Choice, Shape, choices, own_shape
from flopwright.planner.rollouts.engines import Served, served, served_shapes, shape_of
from flopwright.planner.rollouts.outcome import Outcome, binding, outcome, words
from flopwright.planner.rollouts.plans import loop_plan
from flopwright.planner.rollouts.result import InfeasibleLoop, LoopResult, RankedLoop
from flopwright.planner.rollouts.updates import UpdateOption, update_option
from flopwright.spec.loop import LoopScenario

_ZOOMS: Final = 3  # rounds of values between neighbours
_TOLD: Final = 12
_OVERRUN: Final = 1.5  # times the limit, for what binds the best


@dataclass(slots=True)
class _Search:
    """What is known so far: prices by shape and by GPUs, candidates, what they reached."""

    loop: LoopScenario
    rounds: int
    seed: int
    started_s: float
    time_limit_s: float | None
    progress: Progress | None
    work: Work
    engines: dict[Shape, Served | None] = field(default_factory=dict)
    updates: dict[int, UpdateOption | InputError] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    known: set[Choice] = field(default_factory=set)
    infeasible: list[tuple[str, float, tuple[Violation, ...]]] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    reached: dict[int, Reached] = field(default_factory=dict)
    ruled_out: set[int] = field(default_factory=set)

    def shapes(self) -> tuple[Shape, ...]:
        """Returns the instances to try, priced; those that hold no cache are told of."""
        if self.loop.serve is None:
            self.engines[own_shape(self.loop)] = None
            return tuple(self.engines)
        fitting, lacking = served_shapes(self.loop)
        if lacking:
            self.infeasible.append(("smaller instances", 0.0, lacking))
        for shape in fitting:
            try:
                self.engines[shape_of(shape)] = served(self.loop, self.loop.serve, shape)
            except InputError as error:
                name = f"instances of tp{shape.tp} dp{shape.dp} ep{shape.ep}"
                self.infeasible.append((name, 0.0, error.violations))
        return tuple(self.engines)

    def update(self, gpus: int) -> UpdateOption | InputError:
        """Returns how so many GPUs train, searched once."""
        if gpus not in self.updates:
            try:
                self.updates[gpus] = update_option(self.loop, gpus)
            except InputError as error:
                self.updates[gpus] = error
        return self.updates[gpus]

    def add(self, found: Iterable[Choice]) -> list[int]:
        """Makes choices complete; returns the places of those that can be simulated."""
        added = []
        for choice in found:
            if choice in self.known:
                continue
            self.known.add(choice)
            update = self.update(update_gpus(self.loop, choice))
            if isinstance(update, InputError):
                self.infeasible.append((words(choice), 0.0, update.violations))
                continue
            shape = Shape(choice.gpus_per_instance, choice.tp, choice.ep)
            engine = self.engines[shape]
            made = candidate(self.loop, choice, engine, update, self.rounds, self.work)
            if made.violations:
                self.infeasible.append((words(choice), made.most, made.violations))
                continue
            self.candidates.append(made)
            added.append(len(self.candidates) - 1)
        return added

    def value(self, index: int, attempts_per_s: float) -> float:
        """Returns what is made largest: attempts a second, or for the GPUs that are paid."""
        if self.loop.objective == "throughput":
            return attempts_per_s
        c = self.candidates[index]
        gpus = c.choice.generation_gpus
        gpus += 0 if c.choice.layout == "colocated" else c.update.gpus
        return attempts_per_s / gpus

    def simulate(self, index: int) -> Reached:
        """Returns what a candidate reaches; one that breaks a goal rules nothing out."""
        made = self.candidates[index]
        try:
            found = outcome(self.loop, made, self.rounds, self.seed)
        except InputError as error:
            self.infeasible.append((words(made.choice), made.most, error.violations))
            return Reached(0.0, np.inf, counts=False)
        self.outcomes[index] = found
        bound = self.loop.rollout.goals.max_mean_staleness
        counts = bound is None or found.mean_staleness <= bound + 1e-9
        if bound is not None and not counts:
            broken = staleness_violation(made.choice, found.mean_staleness, bound)
            self.infeasible.append((words(made.choice), found.attempts_per_s, (broken,)))
        return Reached(self.value(index, found.attempts_per_s), found.mean_staleness, counts)

    def explore(self, places: list[int]) -> Explored:
        """Simulates what can matter among the candidates at these places."""
        known = [i for i in self.reached if self.reached[i].counts]
        best = [self.reached[i] for i in front_of({i: self.reached[i] for i in known})]
        most = [self.value(i, self.candidates[i].most) for i in places]
        least = [self.candidates[i].least_staleness for i in places]
        found = best_first(
            np.array(most, float),
            np.array(least, float),
            lambda k: self.simulate(places[k]),
            known=best,
            time_limit_s=self.time_left_s(),
            progress=self.progress,
        )
        self.reached |= {places[k]: r for k, r in found.reached.items()}
        self.ruled_out |= {places[k] for k in found.ruled_out}
        return found

    def time_left_s(self) -> float | None:
        """Returns the seconds left, at least 0; None without a limit."""
        if self.time_limit_s is None:
            return None
        return max(0.0, self.time_limit_s - (time.monotonic() - self.started_s))

    def overrun(self) -> bool:
        """Returns whether what follows the search has had half of its time again."""
        limit = self.time_limit_s
        return limit is not None and time.monotonic() - self.started_s > _OVERRUN * limit

    def best(self) -> int | None:
        """Returns the place of the best so far."""
        counted = [i for i, r in self.reached.items() if r.counts]
        if not counted:
            return None
        return max(counted, key=lambda i: (self.reached[i].value, -self.reached[i].level, -i))

    def near(self, index: int) -> list[Choice]:
        """Returns choices half way from a candidate to its neighbours, one axis at a time."""
        own = self.candidates[index].choice
        alike = [c for c in self.known if _same_but(c, own, "stop_fraction")]
        out: list[Choice] = []
        if own.layout != "async" and self.loop.rollout.stop.rule == "lambda":
            for x in between([c.stop_fraction for c in alike], own.stop_fraction):
                out.append(replace(own, stop_fraction=round(x, 4)))
        alike = [c for c in self.known if _same_but(c, own, "slots") and c.slots]
        if own.slots and not self.loop.search.slots:
            for x in between([float(c.slots) for c in alike], float(own.slots)):
                out.append(replace(own, slots=round(x)))
        return out


def _same_but(a: Choice, b: Choice, axis: str) -> bool:
    return replace(a, **{axis: getattr(b, axis)}) == b


def search_loop(
    loop: LoopScenario,
    *,
    rounds: int | None = None,
    seed: int | None = None,
    time_limit_s: float | None = None,
    top_k: int = 5,
    zoom: bool = True,
    progress: Progress | None = None,
) -> LoopResult:
    """Returns the best loops of a scenario, the front, and what does not fit.

    Args:
        rounds: kept of each simulation, after its warm-up; None takes the scenario's.
        time_limit_s: no simulation starts after it, but the first one does.
        zoom: try values between neighbours of the best, on lambda and slots.
        progress: called with (settled, all) of the grid.

    Raises:
        InputError: not one choice could even be made complete.
    """
    state = _Search(
        loop=loop,
        rounds=rounds or loop.rollout.rounds,
        seed=loop.rollout.seed if seed is None else seed,
        started_s=time.monotonic(),
        time_limit_s=time_limit_s,
        progress=progress,
        work=work_of(loop.rollout),
    )
    grid = choices(loop, state.shapes())
    places = state.add(grid)
    if not places and not state.infeasible:
        raise InputError(_nothing(loop))
    left = len(state.explore(places).left) if places else 0
    for _ in range(_ZOOMS if zoom and not left else 0):
        best = state.best()
        if best is None:
            break
        added = state.add(state.near(best))
        if not added or state.time_left_s() == 0:
            break
        left += len(state.explore(added).left)
    return _result(state, left, top_k, time.monotonic() - state.started_s)


def _nothing(loop: LoopScenario) -> Violation:
    return Violation(
        field="search",
        rule=f"no choice uses the {loop.num_gpus} GPUs: instances must divide them, and be no "
        f"more than the {loop.rollout.num_attempts} attempts in flight",
        nearest_fix="other gpus, or more of tp, ep and layout in search",
    )


def _result(state: _Search, left: int, top_k: int, seconds: float) -> LoopResult:
    counted = [i for i, r in state.reached.items() if r.counts]
    order = sorted(counted, key=lambda i: (-state.reached[i].value, state.reached[i].level, i))
    binds: dict[str, float] = {}
    if order:
        top = state.candidates[order[0]]
        found = state.outcomes[order[0]]
        binds = binding(state.loop, top, found, state.rounds, state.seed, state.overrun)
    best = state.reached[order[0]].value if order else 0.0
    return LoopResult(
        scenario=state.loop.name,
        seed=state.seed,
        objective=state.loop.objective,
        candidates=len(state.known),
        simulated=len(state.reached),
        ruled_out=len(state.ruled_out),
        left=left,
        seconds=seconds,
        ranked=tuple(_ranked(state, i, binds if i == order[0] else {}) for i in order[:top_k]),
        front=tuple(_ranked(state, i, {}) for i in front_of(state.reached)),
        infeasible=_told(state, best),
        binds=binds,
        assumptions=_assumptions(state, order[:1]),
    )


def _ranked(state: _Search, index: int, binds: dict[str, float]) -> RankedLoop:
    made, found = state.candidates[index], state.outcomes[index]
    assert made.scenario is not None
    served_by = state.engines[Shape(made.choice.gpus_per_instance, made.choice.tp, made.choice.ep)]
    return RankedLoop(
        words=words(made.choice),
        plan=loop_plan(state.loop, made, found, binds, state.seed),
        outcome=found,
        scenario=made.scenario,
        kv_capacity_tokens=None if served_by is None else served_by.engine.kv_capacity_tokens,
    )


def _told(state: _Search, best: float) -> tuple[InfeasibleLoop, ...]:
    """Returns what does not fit: one of each rule first, then by what it could have reached."""
    ordered = sorted(state.infeasible, key=lambda entry: -entry[1])
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


def _assumptions(state: _Search, order: list[int]) -> tuple[str, ...]:
    texts: list[str] = []
    for index in order:
        report = state.outcomes[index].report
        texts += () if report is None else report.assumptions
        texts += state.candidates[index].update.assumptions
    texts += [
        f"{name}: {text}"
        for name, text in {**state.loop.rollout.sources, **state.loop.sources}.items()
        if text.startswith("assumed")
    ]
    return tuple(dict.fromkeys(texts))
