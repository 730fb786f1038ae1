"""What one simulated round leaves behind: its metrics and the raw counts they come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from flopwright.report.metrics import RoundMetrics
from flopwright.simulator.rollouts.lengths import Floats, Ints
from flopwright.simulator.rollouts.state import PhaseResult

PHASES: Final = ("generation", "switch_to_update", "update", "switch_to_generation", "weight_sync")
REWARD: Final = "reward"  # behind generation, in rounds that wait for a verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One round with everything that was counted.

    Attributes:
        finish_s: seconds from the start of the phase to each counted completion, in order.
        lengths: tokens of the counted completions, by age; `lags` their policy versions
            behind (version at completion less version at the first token).
        rounds_in_flight: rounds each of them was in flight, queueing included.
        carried: attempts that cross to the next version with tokens of this or older ones.
        off_policy_tokens: tokens of these completions that older versions generated.
        trained_tokens: tokens (prompts included) of the prompts dispatched to training.
        trained_lags: policy versions behind of the attempts trained on.
        trained_token_lags: histogram: generated tokens trained on by versions behind.
        masked_tokens: of these, tokens too old to count in the loss.
        dropped, dropped_tokens: attempts thrown away at the end of the round, and their tokens.
        at_budget, verbose: counted completions that reached the effort budget, or are longer
            than the verbosity limit.
        parked_kv_tokens: tokens of cache kept over the update, on GPUs or in pools.
        phase: what the generation phase counted; its log where one was asked for.
    """

    metrics: RoundMetrics
    finish_s: Floats
    lengths: Ints
    lags: Ints
    rounds_in_flight: Ints
    carried: int
    off_policy_tokens: int
    trained_tokens: int
    trained_lags: Ints
    trained_token_lags: dict[int, int] = field(default_factory=dict)
    masked_tokens: int = 0
    dropped: int = 0
    dropped_tokens: int = 0
    at_budget: int = 0
    verbose: int = 0
    parked_kv_tokens: int = 0
    phase: PhaseResult


class Versions:
    """Which policy version generated which tokens of the attempts that are not trained on yet."""

    def __init__(self) -> None:
        self.ids = self.versions = self.tokens = np.zeros(0, dtype=np.int64)

    def add(self, ids: Ints, version: int, tokens: Ints) -> None:
        """Takes down what a version generated."""
        some = tokens > 0
        self.ids = np.concatenate([self.ids, ids[some]])
        self.versions = np.concatenate([self.versions, np.full(int(some.sum()), version)])
        self.tokens = np.concatenate([self.tokens, tokens[some]])

    def take(self, ids: Ints) -> tuple[Ints, Ints]:
        """Returns (versions, tokens) of these attempts, and forgets them."""
        chosen = np.isin(self.ids, ids)
        out = self.versions[chosen], self.tokens[chosen]
        self.ids, self.versions = self.ids[~chosen], self.versions[~chosen]
        self.tokens = self.tokens[~chosen]
        return out
