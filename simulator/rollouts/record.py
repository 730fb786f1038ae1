"""What one simulated round leaves behind: its metrics and the raw counts they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flopwright.report.metrics import RoundMetrics
from flopwright.simulator.rollouts.lengths import Floats, Ints

PHASES: Final = ("generation", "switch_to_update", "update", "switch_to_generation", "weight_sync")


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
