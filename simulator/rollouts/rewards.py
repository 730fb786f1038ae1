"""Verdicts that training waits for after generation: a queue in front of workers, beside it.

Where the round itself waits for them (`stop.rewarded`) they are events of the phase instead.
"""

from __future__ import annotations

import heapq

import numpy as np

from flopwright.plan.rollout import Flags
from flopwright.simulator.rollouts.lengths import Floats, Ints
from flopwright.simulator.rollouts.rules import pairs_of
from flopwright.simulator.rollouts.workload import verdict_seconds
from flopwright.spec.rollout import RolloutScenario


class Judges:
    """The workers of a scenario's rewards, over all rounds."""

    def __init__(self, scenario: RolloutScenario, seed: int) -> None:
        self._scenario = scenario
        self._rng = np.random.default_rng([seed, 0x6A7564])
        self._free = [0.0] * scenario.reward.workers

    def wait_s(
        self, finish_s: Floats, tokens: Ints, prompts: Ints, trained: Ints, end_s: float
    ) -> float:
        """Returns the seconds after generation until the last verdict that training needs.

        Args:
            finish_s, tokens, prompts: of the attempts that completed in this round, in order.
            trained: prompts that are dispatched to training.
            end_s: when generation ended.
        """
        reward = self._scenario.reward
        if reward.kind == "none" or self._scenario.stop.rewarded or len(finish_s) == 0:
            return 0.0
        if reward.kind == "tournament":
            arrive, seconds, needed = self._pairs(finish_s, tokens, prompts, trained)
        else:
            arrive, needed = finish_s, np.isin(prompts, trained)
            seconds = verdict_seconds(reward, self._rng, tokens)
        ends = queue_ends(arrive, seconds, self._free)
        return max(0.0, float(ends[needed].max()) - end_s) if needed.any() else 0.0

    def pass_time(self, elapsed_s: float) -> None:
        """Lets time pass until the next generation phase begins."""
        self._free = [x - elapsed_s for x in self._free]

    def _pairs(
        self, finish_s: Floats, tokens: Ints, prompts: Ints, trained: Ints
    ) -> tuple[Floats, Floats, Flags]:
        """Returns the comparisons: when their prompt was complete, and how long each takes."""
        reward = self._scenario.reward
        pairs = pairs_of(self._scenario)
        arrive, seconds = [], []
        for prompt in trained.tolist():
            mine = prompts == prompt
            mean = float(tokens[mine].mean()) if mine.any() else 0.0
            arrive.append(float(finish_s[mine].max()) if mine.any() else 0.0)
            read = (reward.read_tokens + 2 * mean) / reward.read_tokens_per_s
            seconds.append(read + reward.verdict_tokens / reward.verdict_tokens_per_s)
        order = np.argsort(np.array(arrive), kind="stable")
        return (
            np.repeat(np.array(arrive)[order], pairs),
            np.repeat(np.array(seconds)[order], pairs),
            np.ones(len(arrive) * pairs, dtype=bool),
        )


def queue_ends(arrive: Floats, seconds: Floats, free: list[float]) -> Floats:
    """Returns when each job ends that workers take first come, first served.

    Args:
        arrive: growing; `seconds` each takes.
        free: when each worker is free; updated in place.
    """
    heapq.heapify(free)
    ends = np.zeros(len(arrive))
    for i, (at_s, takes_s) in enumerate(zip(arrive.tolist(), seconds.tolist(), strict=True)):
        ends[i] = max(at_s, free[0]) + takes_s
        heapq.heapreplace(free, float(ends[i]))
    return ends
