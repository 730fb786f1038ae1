"""The choices of a round: when it ends, who runs where and when, what happens to caches."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from flopwright.spec.base import Grown, Spec
from flopwright.spec.rollouts.bounds import BoundedBytes
from flopwright.spec.rollouts.engine import HostPool
from flopwright.spec.rollouts.lengths import Count, PositiveTokens


class Stop(Grown):
    """What ends a generation phase.

    Attributes:
        rule: "lambda": ceil(lambda * those in flight) completions. "over_issue": `factor`
            times as many prompts are in flight as a round needs; it ends when prompts x
            samples (or prompts) are complete: lambda is 1 / factor. "token_budget": every
            attempt generates at most `tokens` a round, longer ones go on in the next.
        count: whether attempts or whole prompts are counted ("groups").
        keep: whether what is cut off is resumed, or thrown away and its prompt begun anew.
        rewarded: an attempt counts when its verdict is there, not when its last token is: a slow
            judge delays the end of the round. Otherwise verdicts are waited for afterwards.
    """

    later_fields: ClassVar[tuple[str, ...]] = ("rewarded",)

    rule: Literal["lambda", "over_issue", "token_budget"] = "lambda"
    count: Literal["attempts", "groups"] = "attempts"
    tokens: PositiveTokens | None = None
    factor: float | None = Field(default=None, gt=1, le=100)
    keep: bool = True
    rewarded: bool = False

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.rule == "token_budget") != (self.tokens is not None):
            raise ValueError("tokens goes with rule: token_budget, and only with it")
        if (self.rule == "over_issue") != (self.factor is not None):
            raise ValueError("factor goes with rule: over_issue, and only with it")
        if self.rule == "token_budget" and self.count == "groups":
            raise ValueError("a token budget ends the round by itself: count must be attempts")
        if self.rule == "token_budget" and self.rewarded:
            raise ValueError("a token budget ends the round by itself: rewarded must be false")
        return self


class Schedule(Spec):
    """Who gets a free place first, and on which instance.

    Attributes:
        order: "fifo": parked attempts, then new ones, each by age. "oracle": most tokens left
            first (no real engine can). "longest_first": the same by an estimate whose log is
            off by a normal error of `estimate_sigma`. "probe": one sample of every prompt
            goes first; then prompts by the longest sample seen so far, unseen ones before all.
        routing: "pooled": one queue, whichever instance has room takes the next. "uniform":
            attempts are dealt to the instances at the start of a round and stay there;
            "group": the same by prompt, so that samples can share the prompt's cache.
        chunk_tokens: an attempt goes back into the pool after so many tokens, with its cache
            in the host pool, and may go on at another instance (divided rollout).
        concurrency: attempts of an instance that are begun and neither complete nor parked,
            those in tool calls included. None: no limit.
    """

    order: Literal["fifo", "longest_first", "oracle", "probe"] = "fifo"
    routing: Literal["pooled", "uniform", "group"] = "pooled"
    chunk_tokens: PositiveTokens | None = None
    estimate_sigma: float = Field(default=0.5, ge=0, le=10)
    concurrency: Count | None = None

    @model_validator(mode="after")
    def _pool(self) -> Self:
        if self.chunk_tokens is not None and self.routing != "pooled":
            raise ValueError("chunk_tokens moves attempts between instances: routing: pooled")
        return self


class Throttle(Spec):
    """Admission from active attempts, queued ones and the use of the cache.

    An instance begins a new attempt while its cache, that of attempts in tool calls included,
    stays below `high` of its capacity with the newcomer, and fewer attempts than its limit run
    or are in tool calls. The limit starts at `start`, is set to `decrease` times those that are
    active when a cache was lost for want of room (preempted, or evicted and not kept in a
    pool), and grows by `increase` with every completion while the queue is not empty and use
    is below `low`.
    """

    high: float = Field(default=0.95, gt=0, le=1)
    low: float = Field(default=0.9, ge=0, le=1)
    start: Count | None = None
    decrease: float = Field(default=0.9, gt=0, lt=1)
    increase: float = Field(default=1.0, gt=0, le=1000)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError("low must not exceed high")
        return self


class KvCache(Grown):
    """The cache of contexts: its size, and what becomes of it when it is not decoded.

    Attributes:
        per_token_bytes: bytes of a context token.
        capacity_bytes: what one instance can hold; None: never short. What does not fit is
            preempted: the attempt admitted last gives up its place.
        on_update: what becomes of caches when the weights change: "drop" (prefilled again),
            "keep" (stale entries stay where they are), "park" (in the host pool).
        idle: caches of attempts in a tool call: "keep" (evicted, oldest first, when room is
            needed) or "drop". What is evicted goes to the host pool while that has room.
        preemption: what becomes of a preempted cache: prefilled again, or moved to the host
            pool and back. None: as the engine says, else "recompute".
        prefetch: loads from the host run beside decoding; otherwise the engine waits.
        host, nvme: pool of one instance, and where its overflow goes.
    """

    later_fields: ClassVar[tuple[str, ...]] = ("on_update", "idle", "prefetch")

    per_token_bytes: BoundedBytes = Field(default=0, alias="per_token")
    capacity_bytes: BoundedBytes | None = Field(default=None, alias="capacity")
    on_update: Literal["drop", "keep", "park"] = "drop"
    idle: Literal["keep", "drop"] = "keep"
    preemption: Literal["recompute", "swap"] | None = None
    prefetch: bool = True
    host: HostPool | None = None
    nvme: HostPool | None = None

    @model_validator(mode="after")
    def _both(self) -> Self:
        if self.capacity_bytes is not None and self.per_token_bytes <= 0:
            raise ValueError("capacity needs per_token above zero")
        if self.nvme is not None and self.host is None:
            raise ValueError("nvme is where a full host pool spills: it needs host")
        return self


class Staleness(Spec):
    """How old the oldest token of an attempt may be when it is trained on.

    Attributes:
        max_versions: policy versions between its first token and the update; None: no limit.
        rule: "wait": a round goes on until no attempt would pass the limit in the next.
            "drop": what passes it is thrown away, and its prompt begun anew. "mask": tokens
            that are older do not count in the loss.
    """

    rule: Literal["none", "wait", "drop", "mask"] = "none"
    max_versions: Annotated[int, Field(ge=0, le=10_000)] | None = None

    @model_validator(mode="after")
    def _limit(self) -> Self:
        if (self.rule != "none") != (self.max_versions is not None):
            raise ValueError("max_versions goes with a rule: wait, drop or mask")
        return self
