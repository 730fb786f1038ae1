"""What a search for a loop knows so far: prices, candidates, what they reached."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.planner.rollouts.best_first import (
    Explored,
    Progress,
    Reached,
    best_first,
    front_of,
)
from flopwright.planner.rollouts.bounds import Work
from flopwright.planner.rollouts.candidate import (
    Candidate,
    candidate,
    staleness_violation,
    update_gpus,
)
from flopwright.planner.rollouts.choices import Axes, Choice, Shape, own_shape
from flopwright.planner.rollouts.engines import Served, served, served_shapes, shape_of
from flopwright.planner.rollouts.outcome import Outcome, outcome, words
from flopwright.planner.rollouts.simulated import Fidelity, Simulations
from flopwright.planner.rollouts.updates import UpdateOption, least_update, update_option
from flopwright.spec.loop import LoopScenario

Unfit = tuple[str, float, tuple[Violation, ...]]
_SHORT_ROUNDS: Final = 1
_SHORT_SHARE: Final = 0.7  # of the time limit, for short looks; the rest is for full ones


@dataclass(slots=True)
class Known:
    """The state of a search.

    Attributes:
        engines: by shape; None where the scenario gives the engine in numbers.
        candidates: by number; a choice has the number it was first looked at under.
        screened: what short simulations reached; reached: what full ones did.
        infeasible: name, the most it could have reached, what it breaks.
        unpriced: shapes of instance that the time did not suffice to price.
    """

    loop: LoopScenario
    rounds: int
    sims: Simulations
    started_s: float
    time_limit_s: float | None
    progress: Progress | None
    work: Work
    engines: dict[Shape, Served | None] = field(default_factory=dict)
    updates: dict[int, UpdateOption | InputError] = field(default_factory=dict)
    least: dict[int, UpdateOption] = field(default_factory=dict)
    numbers: dict[Choice, int] = field(default_factory=dict)
    roughs: dict[Choice, Candidate] = field(default_factory=dict)
    candidates: dict[int, Candidate] = field(default_factory=dict)
    infeasible: list[Unfit] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    screened: dict[int, Reached] = field(default_factory=dict)
    reached: dict[int, Reached] = field(default_factory=dict)
    ruled_out: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    unfit: set[int] = field(default_factory=set)
    unpriced: int = 0

    # ---- prices ------------------------------------------------------------------------------

    def axes(self) -> Axes:
        """Returns the axes over the instances to try, priced; what holds no cache is told of."""
        if self.loop.serve is None:
            self.engines[own_shape(self.loop)] = None
            return Axes(self.loop, tuple(self.engines))
        fitting, lacking = served_shapes(self.loop)
        if lacking:
            self.infeasible.append(("smaller instances", 0.0, lacking))
        for shape in fitting:
            if self.engines and self.time_is_up():
                self.unpriced += 1
                continue
            try:
                self.engines[shape_of(shape)] = served(self.loop, self.loop.serve, shape)
            except InputError as error:
                name = f"instances of tp{shape.tp} dp{shape.dp} ep{shape.ep}"
                self.infeasible.append((name, 0.0, error.violations))
        return Axes(self.loop, tuple(self.engines))

    def update(self, gpus: int) -> UpdateOption | InputError:
        """Returns how so many GPUs train, searched once."""
        if gpus not in self.updates:
            try:
                self.updates[gpus] = update_option(self.loop, gpus)
            except InputError as error:
                self.updates[gpus] = error
        return self.updates[gpus]

    # ---- candidates --------------------------------------------------------------------------

    def number(self, choice: Choice) -> int:
        """Returns the number of a choice."""
        return self.numbers.setdefault(choice, len(self.numbers))

    def rough(self, choice: Choice) -> Candidate:
        """Returns a choice under the fastest update that there could be, for a bound."""
        gpus = update_gpus(self.loop, choice)
        known = self.updates.get(gpus)
        if not isinstance(known, UpdateOption):
            if gpus not in self.least:
                self.least[gpus] = least_update(self.loop, gpus)
            known = self.least[gpus]
        before = self.roughs.get(choice)
        if before is None or before.update != known:
            self.roughs[choice] = before = self._made(choice, known)
        return before

    def complete(self, number: int, choice: Choice) -> Candidate | None:
        """Returns a choice with its own update; None where it breaks a rule, which is told."""
        if number in self.candidates:
            return self.candidates[number]
        update = self.update(update_gpus(self.loop, choice))
        if isinstance(update, InputError):
            self.infeasible.append((words(choice), 0.0, update.violations))
            return None
        made = self.rough(choice)
        if made.violations:
            self.infeasible.append((words(choice), made.most, made.violations))
            return None
        self.candidates[number] = made
        return made

    def _made(self, choice: Choice, update: UpdateOption) -> Candidate:
        engine = self.engines[choice.shape]
        return candidate(self.loop, choice, engine, update, self.rounds, self.work)

    def value(self, made: Candidate, attempts_per_s: float) -> float:
        """Returns what is made largest: attempts a second, or for the GPUs that are paid."""
        if self.loop.objective == "throughput":
            return attempts_per_s
        gpus = made.choice.generation_gpus
        gpus += 0 if made.choice.layout == "colocated" else made.update.gpus
        return attempts_per_s / gpus

    # ---- simulations -------------------------------------------------------------------------

    def explore(
        self,
        found: Iterable[Choice],
        *,
        short: bool = False,
        promised: dict[int, tuple[float, float]] | None = None,
    ) -> Explored:
        """Simulates what can matter among choices that were not simulated yet.

        Args:
            short: a short look only; then a choice counts as no fresher than it is likely to be.
            promised: by number, value and staleness that a choice will hardly pass.
        """
        promised = promised or {}
        fresh = [c for c in dict.fromkeys(found) if self._worth(c, short)]
        numbers = [self.number(c) for c in fresh]
        rough = [self.rough(c) for c in fresh]
        mine = self.screened if short else self.reached
        known = [mine[i] for i in front_of(mine)]

        def bounds(made: Candidate, number: int) -> tuple[float, float]:
            most, level = promised.get(number, (np.inf, 0.0))
            level = max(level, likely_staleness(made) if short else 0.0)
            return min(most, self.value(made, made.most)), max(level, made.least_staleness)

        def refine(k: int) -> tuple[float, float] | None:
            made = self.complete(numbers[k], fresh[k])
            return None if made is None else bounds(made, numbers[k])

        first = [bounds(made, number) for made, number in zip(rough, numbers, strict=True)]

        result = best_first(
            np.array([most for most, _ in first], float),
            np.array([level for _, level in first], float),
            lambda k: self.simulate(numbers[k], short=short),
            refine=refine,
            known=known,
            time_limit_s=self.time_left_s(_SHORT_SHARE if short else 1.0),
            progress=self.progress,
        )
        mine |= {numbers[k]: r for k, r in result.reached.items()}
        self.ruled_out |= {numbers[k] for k in result.ruled_out}
        self.left |= {numbers[k] for k in result.left}
        self.unfit |= {numbers[k] for k in result.unfit}
        return result

    def _worth(self, choice: Choice, short: bool) -> bool:
        """Whether a choice was not simulated so far, and has a round that can be."""
        number = self.number(choice)
        if number in self.unfit or number in (self.screened if short else self.reached):
            return False
        made = self.rough(choice)
        if made.violations:  # under any update
            self.unfit.add(number)
            self.infeasible.append((words(choice), made.most, made.violations))
        return not made.violations

    def simulate(self, number: int, *, short: bool = False) -> Reached:
        """Returns what a candidate reaches; one that breaks a goal rules nothing out."""
        made = self.candidates[number]
        fidelity = Fidelity(_SHORT_ROUNDS, short=True) if short else Fidelity(self.rounds)
        try:
            found = outcome(self.loop, made, fidelity, self.sims)
        except InputError as error:
            self.infeasible.append((words(made.choice), made.most, error.violations))
            return Reached(0.0, np.inf, counts=False)
        self.left.discard(number)
        bound = self.loop.rollout.goals.max_mean_staleness
        # A short look is off by a little: what may keep the goal is not thrown away for it.
        counts = bound is None or found.mean_staleness <= bound * (1.05 if short else 1.0) + 1e-9
        if not short:
            self.outcomes[number] = found
            if bound is not None and not counts:
                broken = staleness_violation(made.choice, found.mean_staleness, bound)
                self.infeasible.append((words(made.choice), found.attempts_per_s, (broken,)))
        return Reached(self.value(made, found.attempts_per_s), found.mean_staleness, counts)

    # ---- time --------------------------------------------------------------------------------

    def time_left_s(self, share: float = 1.0) -> float | None:
        """Returns the seconds left of a share of the limit, at least 0; None without a limit."""
        if self.time_limit_s is None:
            return None
        return max(0.0, share * self.time_limit_s - (time.monotonic() - self.started_s))

    def time_is_up(self, *, short: bool = False) -> bool:
        """Returns whether nothing more may be begun."""
        return self.time_left_s(_SHORT_SHARE if short else 1.0) == 0

    # ---- the best ----------------------------------------------------------------------------

    def best(self, *, short: bool = False) -> int | None:
        """Returns the number of the best so far."""
        mine = self.screened if short else self.reached
        ranked = ranked_of(mine)
        return ranked[0] if ranked else None


def likely_staleness(made: Candidate) -> float:
    """Returns a staleness that a candidate hardly stays below, where no bound says so.

    At most half of the attempts in flight wait without a token.
    """
    choice = made.choice
    if choice.layout == "async":
        return 0.5 * min(1, choice.staleness_bound or 0)
    later = 1.0 if choice.layout == "one_step_off" else 0.0
    return 0.5 * (1 / choice.stop_fraction - 1) + later


def ranked_of(reached: dict[int, Reached]) -> Sequence[int]:
    """Returns the candidates that count, the best first, of equals the freshest."""
    counted = [i for i, r in reached.items() if r.counts]
    return sorted(counted, key=lambda i: (-reached[i].value, reached[i].level, i))
