"""A campaign whose lengths grow: fixed concurrency against a throttle, round by round.

Runs that differ in the concurrency alone draw the same lengths. The least time of each round
over all fixed concurrencies is what an oracle would reach that chooses anew every round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pydantic import Field

from flopwright.errors import InputError, Violation
from flopwright.planner.rollouts.simulated import loop_for
from flopwright.simulator.rollouts.rounds import simulate_rounds
from flopwright.spec.base import Spec
from flopwright.spec.rollout import RolloutScenario
from flopwright.spec.rollouts.lengths import Drift
from flopwright.spec.rollouts.policy import Throttle

THROTTLED: Final = "throttle"
Progress = Callable[[int, int], None]


class CampaignRun(Spec):
    """One policy over all rounds.

    Attributes:
        slots: attempts an instance decodes at once; None: the throttle decides.
        round_s: of each round; preemptions: caches taken away in it.
    """

    name: str
    slots: int | None
    round_s: tuple[float, ...]
    preemptions: tuple[int, ...]
    kv_use: tuple[float, ...]

    @property
    def total_s(self) -> float:
        """Seconds of all rounds."""
        return sum(self.round_s)


class Campaign(Spec):
    """Policies compared over the same rounds.

    Attributes:
        growth: lengths of the last round over those of the first.
        mean_tokens: of an attempt submitted in each round, before any cap.
        fixed: one run a fixed concurrency; throttled: the throttle's.
    """

    scenario: str
    rounds: int
    growth: float
    attempts: int
    length_factor: tuple[float, ...]
    fixed: tuple[CampaignRun, ...] = Field(min_length=1)
    throttled: CampaignRun

    @property
    def first_best(self) -> CampaignRun:
        """The fixed concurrency that is fastest in the first round, the largest of equals."""
        return min(self.fixed, key=lambda run: (round(run.round_s[0], 9), -(run.slots or 0)))

    @property
    def optimum_s(self) -> tuple[float, ...]:
        """The least seconds of each round over the fixed concurrencies."""
        return tuple(min(times) for times in zip(*(r.round_s for r in self.fixed), strict=True))

    @property
    def behind(self) -> float:
        """How much longer the throttle takes over all rounds than the optimum of each."""
        return self.throttled.total_s / sum(self.optimum_s) - 1

    @property
    def worst_round(self) -> float:
        """How much longer the throttle takes than the optimum in its worst round."""
        return max(
            mine / least - 1
            for mine, least in zip(self.throttled.round_s, self.optimum_s, strict=True)
        )

    @property
    def fixed_behind(self) -> float:
        """How much longer the first round's best takes in the last tenth of the rounds."""
        last = max(1, self.rounds // 10)
        return sum(self.first_best.round_s[-last:]) / sum(self.optimum_s[-last:]) - 1

    @property
    def storm(self) -> float:
        """Preemptions an attempt of the first round's best in the last tenth of the rounds."""
        last = max(1, self.rounds // 10)
        return sum(self.first_best.preemptions[-last:]) / (last * self.attempts)


def campaign(
    scenario: RolloutScenario,
    *,
    rounds: int = 100,
    growth: float = 8.0,
    slots: Sequence[int] = (),
    seed: int | None = None,
    progress: Progress | None = None,
) -> Campaign:
    """Returns fixed concurrencies and a throttle over rounds whose lengths grow.

    Args:
        growth: lengths of the last round over those of the first, by equal factors.
        slots: fixed concurrencies of an instance; none: halves of its equal share.
        progress: called with (policies done, policies in all).

    Raises:
        InputError: the cache has no end, or a context of the last round outgrows it.
    """
    if scenario.kv_capacity_tokens is None:
        raise InputError(
            Violation(
                field="kv.capacity",
                rule="a campaign compares how policies bear a cache that runs short",
                nearest_fix="give kv.capacity, or an engine with kv_capacity_tokens",
            )
        )
    step = growth ** (1 / max(1, rounds - 1))
    drift = Drift(per_round=step, at_most=max(1.0, growth), at_least=min(1.0, growth))
    growing = scenario.model_copy(update={"drift": drift})
    tried = tuple(slots) or _halves(-(-scenario.num_attempts // scenario.instances))
    used = scenario.seed if seed is None else seed
    policies = [_fixed(growing, n) for n in tried] + [_throttled(growing)]
    runs = []
    for done, (name, each) in enumerate(policies):
        runs.append(_run(name, each, rounds, used))
        if progress is not None:
            progress(done + 1, len(policies))
    return Campaign(
        scenario=scenario.name,
        rounds=rounds,
        growth=growth,
        attempts=scenario.num_attempts,
        length_factor=tuple(drift.factor(version) for version in range(rounds)),
        fixed=tuple(runs[:-1]),
        throttled=runs[-1],
    )


def _halves(most: int) -> tuple[int, ...]:
    """Returns a share and its steps of the square root of two down to a sixteenth."""
    return tuple(sorted({max(1, round(most / 2 ** (k / 2))) for k in range(9)}))


def _fixed(scenario: RolloutScenario, slots: int) -> tuple[str, RolloutScenario]:
    changed = {"slots_per_instance": slots, "throttle": None}
    return f"{slots} slots", scenario.model_copy(update=changed)


def _throttled(scenario: RolloutScenario) -> tuple[str, RolloutScenario]:
    changed = {"slots_per_instance": None, "throttle": scenario.throttle or Throttle()}
    return THROTTLED, scenario.model_copy(update=changed)


def _run(name: str, scenario: RolloutScenario, rounds: int, seed: int) -> CampaignRun:
    records = simulate_rounds(scenario, rounds, seed, loop=loop_for(scenario, rounds))
    capacity = scenario.kv_capacity_tokens or 1
    return CampaignRun(
        name=name,
        slots=scenario.slots_per_instance,
        round_s=tuple(r.metrics.round_time_s for r in records),
        preemptions=tuple(r.metrics.preemptions for r in records),
        kv_use=tuple(min(1.0, r.metrics.kv_peak_tokens / capacity) for r in records),
    )
