"""What a generation engine can do, as the round simulator eats it: seconds of a decode step
and of a prefill, and how much context it holds.

One record is one instance: the GPUs that decode one batch in lockstep. Attention that is
data-parallel over the ranks of an instance is still one instance: its batch, context and
capacity are sums over the ranks, and the times are those of the step they take together.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Annotated, Final, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from flopwright.spec.base import Spec
from flopwright.spec.rollouts.bounds import BoundedBytes
from flopwright.units import BytesPerS

MAX_STEP_S: Final = 86_400.0
# A batch above the last entry of a table that interpolates goes on along its last two.
MAX_ENTRIES: Final = 512
StepSeconds = Annotated[float, Field(ge=0, le=MAX_STEP_S)]
TokenCount = Annotated[int, Field(ge=0, le=10**12)]


class StepTable(Spec):
    """Seconds of one decode step: base_s[i] + per_context_token_s[i] * context tokens.

    i is the first entry whose `batch` holds the active attempts: engines replay a graph that
    was captured for that many and pad the rest. Where `interpolate` is set both columns are
    linear between entries and beyond the last. So n steps of an unchanged set of b attempts
    with C tokens of context in all cost n * base + per_context_token * (n * C + b n (n-1)/2).

    Attributes:
        batch: active attempts an entry is for, growing.
        base_s: seconds of a step without any context.
        per_context_token_s: seconds that one token of context adds, over all attempts.
    """

    batch: tuple[PositiveInt, ...] = Field(min_length=1, max_length=MAX_ENTRIES)
    base_s: tuple[StepSeconds, ...] = Field(alias="base")
    per_context_token_s: tuple[StepSeconds, ...] = Field(alias="per_context_token")
    interpolate: bool = False

    @model_validator(mode="after")
    def _columns(self) -> Self:
        sizes = {len(self.batch), len(self.base_s), len(self.per_context_token_s)}
        if len(sizes) > 1:
            raise ValueError("batch, base and per_context_token must have as many entries each")
        if any(a >= b for a, b in zip(self.batch, self.batch[1:], strict=False)):
            raise ValueError("batch must grow")
        if max(*self.base_s, *self.per_context_token_s) <= 0:
            raise ValueError("a step must take time: all entries are zero")
        if self.interpolate and len(self.batch) < 2:
            raise ValueError("interpolate needs two entries or more")
        return self

    @classmethod
    def linear(
        cls, per_step_s: float, per_attempt_s: float, per_context_token_s: float
    ) -> StepTable:
        """Returns the law a + c * attempts + kappa * context, exact at every batch."""
        return cls(
            batch=(1, 2),
            base_s=(per_step_s + per_attempt_s, per_step_s + 2 * per_attempt_s),
            per_context_token_s=(per_context_token_s, per_context_token_s),
            interpolate=True,
        )

    @property
    def largest(self) -> int | None:
        """The most attempts a step can hold; None where the table goes on beyond its end."""
        return None if self.interpolate else self.batch[-1]

    def coefficients(self, attempts: int) -> tuple[float, float]:
        """Returns (base_s, per_context_token_s) of a step of so many attempts; 0 costs 0.

        Args:
            attempts: active attempts, at most `largest`.
        """
        if attempts <= 0:
            return 0.0, 0.0
        at = bisect_left(self.batch, attempts)
        if not self.interpolate:
            assert at < len(self.batch), f"{attempts} attempts are beyond the table"
            return self.base_s[at], self.per_context_token_s[at]
        high = min(max(at, 1), len(self.batch) - 1)
        low = high - 1
        share = (attempts - self.batch[low]) / (self.batch[high] - self.batch[low])
        columns = (self.base_s, self.per_context_token_s)
        base, per_token = (max(c[low] + share * (c[high] - c[low]), 0.0) for c in columns)
        return base, per_token

    def seconds(self, attempts: int, context_tokens: float) -> float:
        """Returns the seconds of one step; context_tokens is the sum over the attempts."""
        base, per_token = self.coefficients(attempts)
        return base + per_token * context_tokens

    def steps_seconds(self, attempts: int, context_tokens: float, steps: int) -> float:
        """Returns the seconds of `steps` steps of one set, each attempt growing by a token."""
        base, per_token = self.coefficients(attempts)
        grown = steps * context_tokens + attempts * steps * (steps - 1) / 2
        return steps * base + per_token * grown


class PrefillTable(Spec):
    """Seconds of a prefill of t new tokens behind p cached ones of the same attempt.

    fixed + per_token * t + per_pair * (t p + t^2 / 2); the fixed part is paid once a batch.
    """

    fixed_s: StepSeconds = Field(default=0.0, alias="fixed")
    per_token_s: StepSeconds = Field(default=0.0, alias="per_token")
    per_pair_s: StepSeconds = Field(default=0.0, alias="per_pair")

    def seconds(self, new_tokens: float, cached_tokens: float = 0.0) -> float:
        """Returns the seconds of one prefill alone; nothing new costs nothing."""
        if new_tokens <= 0:
            return 0.0
        return self.fixed_s + self.work_seconds(new_tokens, cached_tokens)

    def work_seconds(self, new_tokens: float, cached_tokens: float = 0.0) -> float:
        """Returns the seconds without the fixed part: what a prefill adds to a full batch."""
        pairs = new_tokens * cached_tokens + new_tokens * new_tokens / 2
        return self.per_token_s * new_tokens + self.per_pair_s * pairs


class Speculation(Spec):
    """Speculative decoding: `drafts` tokens are proposed, each accepted while the last was.

    Attributes:
        acceptance: chance that a proposed token is accepted, given that those before were.
        draft_s: seconds the draft model adds to a step, all its proposals together. The cost
            of verifying more tokens at once is in the step table.
    """

    drafts: Annotated[PositiveInt, Field(le=64)]
    acceptance: float = Field(ge=0, le=1)
    draft_s: StepSeconds = Field(default=0.0, alias="draft")

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of one step: 1 + a + ... + a^drafts (Leviathan et al. 2023)."""
        if self.acceptance >= 1:
            return self.drafts + 1.0
        return (1 - self.acceptance ** (self.drafts + 1)) / (1 - self.acceptance)


class HostPool(Spec):
    """A place for caches away from the GPUs (host memory, disks), for one instance.

    Attributes:
        size_bytes: what it holds.
        bytes_per_s: rate to and from the GPUs of the instance, all of them together.
    """

    size_bytes: BoundedBytes = Field(alias="size")
    bytes_per_s: BytesPerS = Field(alias="bandwidth")

    @model_validator(mode="after")
    def _rate(self) -> Self:
        if self.bytes_per_s <= 0:
            raise ValueError("bandwidth must be above zero")
        return self


class EngineModel(Spec):
    """One instance of a generation engine.

    Attributes:
        decode: seconds of a decode step.
        prefill: seconds of a prefill.
        kv_capacity_tokens: context the instance holds over all attempts, a whole number of
            blocks; None: never short.
        block_tokens: cache is handed out in blocks of so many tokens.
        kv_tokens_per_attempt: what an attempt occupies at any length, in tokens of cache:
            recurrent states and the windows of layers that see no further.
        kv_bytes_per_token: bytes of a token of context over all layers and GPUs.
        max_running: attempts decoded at once; None: as many as the cache and table hold.
        preemption: what becomes of an attempt whose cache is taken: prefilled again, or moved
            to the host and back.
        chunk_tokens: prefill that shares a step with decoding, at most so many tokens of it;
            None: a prefill has its step alone.
        prefix_cache: samples of one prompt share its cache.
        gpus: GPUs of the instance.
        ranks: data-parallel attention groups in it, each with its part of the attempts.
        sources: where numbers come from, by field.
    """

    name: str = ""
    decode: StepTable
    prefill: PrefillTable = PrefillTable()
    kv_capacity_tokens: TokenCount | None = None
    block_tokens: PositiveInt = 1
    kv_tokens_per_attempt: NonNegativeInt = 0
    kv_bytes_per_token: float = Field(default=0.0, ge=0)
    max_running: PositiveInt | None = None
    speculation: Speculation | None = None
    preemption: Literal["recompute", "swap"] = "recompute"
    chunk_tokens: PositiveInt | None = None
    prefix_cache: bool = False
    host_pool: HostPool | None = None
    gpus: PositiveInt = 1
    ranks: PositiveInt = 1
    sources: dict[str, str] = Field(default_factory=dict)

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens an attempt gains in one step."""
        return 1.0 if self.speculation is None else self.speculation.tokens_per_step

    @property
    def running_limit(self) -> int | None:
        """The most attempts decoded at once; None where only the cache limits them."""
        given = [n for n in (self.max_running, self.decode.largest) if n is not None]
        return min(given) if given else None

    def attempt_tokens(self, context: int) -> int:
        """Returns tokens of cache that an attempt of this context occupies, in whole blocks."""
        return math.ceil(context / self.block_tokens) * self.block_tokens + (
            self.kv_tokens_per_attempt
        )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        capacity = self.kv_capacity_tokens
        if capacity is not None and capacity < self.block_tokens:
            raise ValueError(
                f"kv_capacity_tokens ({capacity}) must hold one block ({self.block_tokens})"
            )
        if self.preemption == "swap" and self.host_pool is None:
            raise ValueError("preemption: swap needs a host_pool to move caches to")
        return self
