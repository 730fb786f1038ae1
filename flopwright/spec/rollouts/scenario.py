"""One RL loop as numbers: the workload of a round, the engine, the policy, the phases."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from flopwright.spec.base import Grown, Spec
from flopwright.spec.rollouts.agent import Agent, Reward
from flopwright.spec.rollouts.bounds import BoundedBytes
from flopwright.spec.rollouts.engine import EngineModel, PrefillTable
from flopwright.spec.rollouts.lengths import (
    MAX_ATTEMPTS,
    MAX_PHASE_S,
    ContextTokens,
    Count,
    Drift,
    EffortBudget,
    LengthSpec,
    PhaseSeconds,
    VerbosityLimit,
    longest,
)
from flopwright.spec.rollouts.policy import KvCache, Schedule, Staleness, Stop, Throttle
from flopwright.units import BytesPerS

MAX_ROUNDS: Final = 10_000
MIN_STOP_FRACTION: Final = 0.01  # the warm-up alone is 5 / lambda rounds
_SHORTEST_STEP_S: Final = 1e-30


class DecodeStep(Spec):
    """Seconds of one decode step of one instance: a + c * active attempts + kappa * context.

    Attributes:
        a_s: what a step costs at any batch (weights read, kernels launched, latencies).
        c_s: what one more active attempt adds.
        kappa_s: what one more token of context, over all active attempts, adds (KV read).
    """

    a_s: PhaseSeconds = Field(default=0.0, alias="per_step")
    c_s: PhaseSeconds = Field(default=0.0, alias="per_attempt")
    kappa_s: PhaseSeconds = Field(default=0.0, alias="per_context_token")

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if self.a_s + self.c_s + self.kappa_s < _SHORTEST_STEP_S:
            raise ValueError(
                "one of per_step, per_attempt, per_context_token must be above zero "
                f"(at least {_SHORTEST_STEP_S:g} s)"
            )
        return self


class Switch(Spec):
    """Time of the hand-over between the two uses of the same GPUs."""

    to_update_s: PhaseSeconds = Field(default=0.0, alias="to_update")
    to_generation_s: PhaseSeconds = Field(default=0.0, alias="to_generation")


class Update(Spec):
    """Time of the policy update: fixed, plus an amount for every trained token."""

    fixed_s: PhaseSeconds = Field(default=0.0, alias="fixed")
    per_token_s: PhaseSeconds = Field(default=0.0, alias="per_token")


class WeightSync(Spec):
    """Time until the engines hold the new weights: fixed, plus bytes over a bandwidth."""

    fixed_s: PhaseSeconds = Field(default=0.0, alias="fixed")
    size_bytes: BoundedBytes = Field(default=0, alias="size")
    bytes_per_s: BytesPerS | None = Field(default=None, alias="bandwidth")

    @property
    def seconds(self) -> float:
        """Seconds of one synchronisation."""
        return self.fixed_s + (self.size_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)

    @model_validator(mode="after")
    def _rate(self) -> Self:
        if self.size_bytes and not self.bytes_per_s:
            raise ValueError("size needs a bandwidth above zero")
        if self.seconds > MAX_PHASE_S:
            raise ValueError(f"size over bandwidth takes longer than a day ({self.seconds:.3g} s)")
        return self


class RolloutGoals(Spec):
    """What the lambda sweep must respect: mean policy versions behind at completion."""

    max_mean_staleness: float | None = Field(default=None, ge=0, le=1e6)


class RolloutScenario(Grown):
    """One co-located RL loop: generate, update, synchronise, again.

    Attributes:
        prompts: prompts a round needs; with `samples_per_prompt` the attempts in flight
            (times `stop.factor` where more are issued than needed).
        lengths: tokens an attempt generates; `group_correlation` is the share of their
            variance (of the normal score) that the prompt decides.
        stop_fraction: lambda: the share of those in flight whose completion ends a round; 1
            waits for all of them.
        ties: what becomes of attempts that finish in the very step in which the round ends:
            "all" counts them in this round, "strict" counts exactly ceil(lambda * attempts)
            and the surplus first in the next round.
        rounds: rounds measured, after the warm-up.
        slots_per_instance: attempts an instance decodes at once; None: all it is given.
        decode: a linear step; or `engine`: tables, cache and limits of a whole engine.
        prefill: seconds of reading prompts and what comes back from caches that were lost.
        sources: where a number comes from; "assumed: ..." where nothing was published.
    """

    later_fields: ClassVar[tuple[str, ...]] = (
        "group_correlation",
        "drift",
        "reward",
        "stop",
        "staleness",
        "schedule",
    )

    kind: Literal["rollout"] = "rollout"
    name: str = Field(min_length=1)
    description: str = ""
    prompts: Count
    samples_per_prompt: Count = 1
    prompt_tokens: ContextTokens = 0
    lengths: LengthSpec = Field(discriminator="kind")
    group_correlation: float = Field(default=0.0, ge=0, le=1)
    drift: Drift = Drift()
    effort: EffortBudget | None = None
    verbosity: VerbosityLimit | None = None
    agent: Agent | None = None
    reward: Reward = Reward()
    stop_fraction: float = Field(default=1.0, alias="lambda", ge=MIN_STOP_FRACTION, le=1)
    stop: Stop = Stop()
    ties: Literal["all", "strict"] = "all"
    staleness: Staleness = Staleness()
    schedule: Schedule = Schedule()
    throttle: Throttle | None = None
    rounds: Annotated[PositiveInt, Field(le=MAX_ROUNDS)] = 20
    instances: Count = 1
    gpus_per_instance: Count = 1
    slots_per_instance: Count | None = None
    decode: DecodeStep | None = None
    prefill: PrefillTable | None = None
    engine: EngineModel | None = None
    switch: Switch = Switch()
    update: Update = Update()
    weight_sync: WeightSync = WeightSync()
    kv: KvCache = KvCache()
    goals: RolloutGoals = RolloutGoals()
    seed: NonNegativeInt = 0
    sources: dict[str, str] = Field(default_factory=dict)

    @property
    def num_prompts(self) -> int:
        """Prompts in flight at the start of a round."""
        factor = self.stop.factor or 1.0
        return max(self.prompts + (factor > 1), round(self.prompts * factor))

    @property
    def num_attempts(self) -> int:
        """Attempts in flight at the start of every round (N * K)."""
        return self.num_prompts * self.samples_per_prompt

    @property
    def fraction(self) -> float:
        """The share of those in flight that ends a round: lambda, or what was over-issued."""
        if self.stop.rule == "over_issue":
            return self.prompts / self.num_prompts
        return self.stop_fraction

    @property
    def num_gpus(self) -> int:
        """GPUs of the loop; the update runs on the same ones."""
        return self.instances * self.gpus_per_instance

    @property
    def fixed_s(self) -> float:
        """Seconds of a round that depend neither on lambda nor on any token."""
        switch = self.switch.to_update_s + self.switch.to_generation_s
        return switch + self.update.fixed_s + self.weight_sync.seconds

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of a token of context; 0 where they are not counted."""
        engine = self.engine.kv_bytes_per_token if self.engine is not None else 0.0
        return self.kv.per_token_bytes or engine

    @property
    def kv_capacity_tokens(self) -> int | None:
        """Tokens of context that an instance holds; None: never short."""
        if self.kv.capacity_bytes is not None:
            return self.kv.capacity_bytes // self.kv.per_token_bytes
        return self.engine.kv_capacity_tokens if self.engine is not None else None

    @property
    def longest_context(self) -> int | None:
        """The most tokens of one context, or None where there is no bound."""
        if self.agent is not None:
            return self.agent.max_context
        most = longest(self.lengths)
        if most is not None and self.lengths.cap is None and self.drift.per_round > 1:
            most = math.ceil(most * self.drift.at_most)
        if self.effort is not None:
            most = min(most or self.effort.tokens, self.effort.tokens)
        return None if most is None else self.prompt_tokens + most

    @field_validator("update", "weight_sync", mode="before")
    @classmethod
    def _just_a_time(cls, value: Any) -> Any:
        return {"fixed": value} if isinstance(value, (str, int, float)) else value

    @model_validator(mode="after")
    def _room_for_prompts(self) -> Self:
        most = self.agent.max_context if self.agent is not None else None
        if most is not None and most <= self.prompt_tokens:
            raise ValueError(
                f"agent.max_context ({most}) must be above prompt_tokens ({self.prompt_tokens}): "
                "a prompt alone fills the context"
            )
        return self

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.num_attempts > MAX_ATTEMPTS:
            raise ValueError(
                f"prompts * samples_per_prompt ({self.num_attempts}) is above {MAX_ATTEMPTS}"
            )
        if self.instances > self.num_attempts:
            raise ValueError(
                f"instances ({self.instances}) must not exceed the attempts in flight "
                f"({self.num_attempts})"
            )
        if (self.decode is None) == (self.engine is None):
            raise ValueError("give one of decode (a linear step) and engine (tables)")
        if self.engine is not None and self.prefill is not None:
            raise ValueError("an engine brings its own prefill times: leave prefill out")
        if self.stop.rule != "lambda" and self.stop_fraction != 1:
            raise ValueError(f"lambda goes with stop.rule lambda, not {self.stop.rule}")
        if self.staleness.rule == "wait" and self.stop.rule == "token_budget":
            raise ValueError("a token budget cannot wait for old attempts: staleness.rule drop")
        if self.stop.rewarded and self.reward.kind == "none":
            raise ValueError("stop.rewarded waits for verdicts: give a reward")
        if (
            self.stop.rewarded
            and self.reward.kind == "tournament"
            and self.stop.count == "attempts"
            and self.samples_per_prompt > 1
        ):
            raise ValueError("a tournament judges whole prompts: stop.count must be groups")
        self._caches()
        return self

    def _caches(self) -> None:
        """Refuses what could never run for want of cache, and pools that are not there."""
        capacity, most = self.kv_capacity_tokens, self.longest_context
        host = self.kv.host or (self.engine and self.engine.host_pool)
        if self.kv.on_update == "park" and host is None:
            raise ValueError("kv.on_update: park needs kv.host, the pool to park in")
        if self.kv.preemption == "swap" and host is None:
            raise ValueError("kv.preemption: swap needs kv.host, the pool to swap to")
        if capacity is None:
            return
        if most is None:
            where = "lengths.cap" if self.agent is None else "agent.max_context"
            raise ValueError(f"kv.capacity needs {where}: a context could outgrow it")
        need = self.engine.attempt_tokens(most) if self.engine is not None else most
        if need > capacity:
            fits = capacity - (need - most) - self.prompt_tokens
            where = "lengths.cap" if self.agent is None else "agent.max_context"
            fits += 0 if self.agent is None else self.prompt_tokens
            size = round(need * self.kv_bytes_per_token)
            of = self.kv.capacity_bytes or round(capacity * self.kv_bytes_per_token)
            raise ValueError(
                f"one context of {most} tokens ({size} bytes) is larger "
                f"than kv.capacity ({of} bytes): it could never finish; "
                + (f"{where}: {fits} would fit" if fits > 0 else "the prompt alone is")
            )
