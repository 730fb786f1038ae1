"""Rounds simulated once: candidates whose rounds are the same share them.

Two candidates may differ in what is not part of a round: whether training overlaps generation,
say. How many rounds are simulated is the fidelity: in full, or a short look that tells which
ones are worth more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Final

from flopwright.report.metrics import RoundMetrics
from flopwright.simulator.rollouts.drivers import Kind
from flopwright.simulator.rollouts.report import RoundReport, round_report, warmup_rounds
from flopwright.simulator.rollouts.rounds import simulate_rounds
from flopwright.spec.rollout import RolloutScenario

_MANY_ATTEMPTS: Final = 5000  # over all rounds of one simulation


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How much is simulated.

    Attributes:
        rounds: kept; short: after a warm-up just long enough to see what is parked.
    """

    rounds: int
    short: bool = False

    def warmup(self, scenario: RolloutScenario) -> int:
        """Returns the rounds thrown away first."""
        if not self.short:
            return warmup_rounds(scenario.fraction)
        return math.ceil(1 / scenario.fraction) if scenario.fraction < 1 else 1


@dataclass(slots=True)
class Simulations:
    """Steady rounds by their scenario, of one seed.

    Attributes:
        runs: simulations that were really run, by fidelity: (in full, short).
    """

    seed: int
    runs: list[int] = field(default_factory=lambda: [0, 0])
    _known: dict[str, tuple[RoundReport, tuple[RoundMetrics, ...]]] = field(default_factory=dict)

    def steady(
        self, scenario: RolloutScenario, fidelity: Fidelity
    ) -> tuple[RoundReport, Sequence[RoundMetrics]]:
        """Returns the report over kept rounds, and their metrics with one round before them.

        Raises:
            InputError: the round cannot run.
        """
        key = f"{scenario.content_hash()} {fidelity.rounds} {fidelity.short}"
        if key not in self._known:
            warm = fidelity.warmup(scenario)
            total = warm + fidelity.rounds
            records = simulate_rounds(scenario, total, self.seed, loop=loop_for(scenario, total))
            report = round_report(scenario, records[warm:], warmup=warm, seed=self.seed)
            self.runs[fidelity.short] += 1
            self._known[key] = (report, tuple(r.metrics for r in records[max(0, warm - 1) :]))
        return self._known[key]


def loop_for(scenario: RolloutScenario, rounds: int) -> Kind:
    """Returns which event loop runs: a search runs many rounds, so the compiled one pays early."""
    many = scenario.num_attempts * rounds >= _MANY_ATTEMPTS
    return "compiled" if many and find_spec("numba") is not None else "auto"
