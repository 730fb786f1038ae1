"""What changes while a run goes on: learning rate, batch, and the phases behind the first.

A run's first phase is what its Workload says. Later phases say what differs: more tokens at
another context, batch, rate, mixture of data or scaling of positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from flopwright.spec.base import Grown, Spec
from flopwright.spec.model import RopeScaling
from flopwright.units import Tokens

MAX_BATCH: Final = 2**31
MAX_SEQ_LEN: Final = 2**31
# Batches that a ramp goes through, each of them priced.
MAX_LEVELS: Final = 256


class LearningRate(Spec):
    """A schedule in steps: linear warm-up, then constant, linear, cosine, or WSD.

    `wsd`: warm-up, hold until `hold_until_tokens`, cosine to `final` at the budget.
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    peak: PositiveFloat = 2e-4
    final: NonNegativeFloat = 2e-5
    warmup_steps: NonNegativeInt = 500
    hold_until_tokens: Tokens | None = None

    @model_validator(mode="after")
    def _hold(self) -> Self:
        if (self.kind == "wsd") != (self.hold_until_tokens is not None):
            raise ValueError("hold_until_tokens goes with kind 'wsd', and only with it")
        return self

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.kind != "constant" and self.final > self.peak:
            raise ValueError(f"final ({self.final:g}) must not exceed peak ({self.peak:g})")
        return self


class BatchRamp(Spec):
    """Smaller batches first: from `start` sequences by `increment` to the full batch.

    Attributes:
        tokens: of all smaller batches together; each of them has an equal part, and its last
            step may reach into the next one's (Megatron-LM's --rampup-batch-size).
    """

    start: int = Field(ge=1, le=MAX_BATCH)
    increment: int = Field(ge=1, le=MAX_BATCH)
    tokens: Tokens

    def batches(self, full: int) -> range:
        """Returns the batches below the full one, the smallest first."""
        return range(self.start, full, self.increment)


class BatchLevel(NamedTuple):
    """Steps of one batch: `steps` steps of `batch` sequences from step `first_step` on.

    `first_token` is how many tokens came before.
    """

    batch: int
    steps: int
    first_step: int
    first_token: int


def batch_levels(
    seq_len: int, full: int, total_tokens: int, ramp: BatchRamp | None
) -> tuple[BatchLevel, ...]:
    """Returns the batches of a run in order; the last step may be partly past the budget."""
    return tuple(_levels(seq_len, full, total_tokens, ramp))


def _levels(
    seq_len: int, full: int, total_tokens: int, ramp: BatchRamp | None
) -> Iterator[BatchLevel]:
    smaller = range(0) if ramp is None else ramp.batches(full)
    step = token = 0
    for i, batch in enumerate((*smaller, full)):
        end = total_tokens
        if ramp is not None and i < len(smaller):
            end = min(end, -(-ramp.tokens * (i + 1) // len(smaller)))
        steps = max(0, -(-(end - token) // (batch * seq_len)))
        if steps:
            yield BatchLevel(batch, steps, step, token)
        step, token = step + steps, token + steps * batch * seq_len


def batch_at(levels: Sequence[BatchLevel], seq_len: int, step: int) -> tuple[int, int]:
    """Returns (samples before step `step`, its sequences); the last level goes on without end."""
    level = max((lv for lv in levels if lv.first_step <= step), key=lambda lv: lv.first_step)
    before = level.first_token // seq_len
    return before + (step - level.first_step) * level.batch, level.batch


class TrainingPhase(Grown):
    """A phase behind the first one: its tokens, and what differs from the run's workload.

    Attributes:
        total_tokens: of this phase alone.
        learning_rate: over this phase, its steps and tokens counted from its start.
        seq_len, global_batch_size: None: as in the workload.
        mixture: name of the data's mixture; None: as in the workload.
        rope_scaling: of the positions from this phase on; "none" for plain ones, None: as in
            the workload.
    """

    later_fields = ("batch_ramp", "mixture", "rope_scaling")

    name: str = Field(min_length=1, pattern=r"^[a-z0-9_]+$")
    total_tokens: Tokens
    learning_rate: LearningRate
    seq_len: int | None = Field(default=None, ge=1, le=MAX_SEQ_LEN)
    global_batch_size: int | None = Field(default=None, ge=1, le=MAX_BATCH)
    batch_ramp: BatchRamp | None = None
    mixture: str | None = Field(default=None, min_length=1)
    rope_scaling: RopeScaling | Literal["none"] | None = None
