"""What an RL rollout workload is: prompts, completion lengths, decode cost, phases, goals.

A round generates until a fraction lambda of the attempts in flight has finished; the rest
is parked and resumed first in the next round, under newer weights.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from flopwright.errors import InputError, Violation
from flopwright.spec.base import Spec
from flopwright.spec.load import SCENARIO_CATALOG, _open
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import parse_yaml
from flopwright.units import Bytes, BytesPerS, Seconds, Tokens

ROLLOUT_CATALOG: Final = SCENARIO_CATALOG / "rollouts"
MAX_ATTEMPTS: Final = 1_000_000
MAX_ROUNDS: Final = 10_000
MIN_STOP_FRACTION: Final = 0.01  # the warm-up alone is 5 / lambda rounds
MAX_PHASE_S: Final = 86_400.0
_SHORTEST_STEP_S: Final = 1e-30

# Bounds beyond any real loop, within which every sum stays finite and every run ends.
Count = Annotated[PositiveInt, Field(le=MAX_ATTEMPTS)]
ContextTokens = Annotated[Tokens, Field(le=1_000_000_000)]
PositiveTokens = Annotated[Tokens, Field(gt=0, le=1_000_000_000)]
PhaseSeconds = Annotated[Seconds, Field(le=MAX_PHASE_S)]
BoundedBytes = Annotated[Bytes, Field(le=2**60)]


class _Lengths(Spec):
    """Tokens of a completion; a drawn length is rounded up to whole tokens.

    Attributes:
        cap: the longest completion; a longer draw is cut there. None: no limit.
    """

    cap: PositiveTokens | None = None


class ExponentialLengths(_Lengths):
    """Memoryless lengths: P(L > x) = exp(-x / mean), before the cap."""

    kind: Literal["exponential"] = "exponential"
    mean: PositiveTokens


class LognormalLengths(_Lengths):
    """log L is normal with standard deviation `sigma`; `mean` is that of L before the cap."""

    kind: Literal["lognormal"] = "lognormal"
    mean: PositiveTokens
    sigma: float = Field(ge=0.001, le=10)


class ParetoLengths(_Lengths):
    """A power tail: P(L > x) = (minimum / x) ** alpha above the minimum, before the cap."""

    kind: Literal["pareto"] = "pareto"
    minimum: PositiveTokens
    alpha: float = Field(gt=1.01, le=100)


class DeterministicLengths(_Lengths):
    """Every completion has the same number of tokens."""

    kind: Literal["deterministic"] = "deterministic"
    tokens: PositiveTokens


class EmpiricalLengths(_Lengths):
    """Lengths as counted in a log: each value with its weight, drawn independently."""

    kind: Literal["empirical"] = "empirical"
    values: tuple[PositiveTokens, ...] = Field(min_length=1)
    weights: tuple[NonNegativeFloat, ...] = ()

    @model_validator(mode="after")
    def _weights(self) -> Self:
        if self.weights and len(self.weights) != len(self.values):
            raise ValueError(
                f"weights ({len(self.weights)}) must be as many as values ({len(self.values)})"
            )
        if self.weights and not 0 < sum(self.weights) < math.inf:
            raise ValueError("weights must be finite, and so must their sum; not all zero")
        return self


LengthSpec = (
    ExponentialLengths | LognormalLengths | ParetoLengths | DeterministicLengths | EmpiricalLengths
)


def longest(lengths: LengthSpec) -> int | None:
    """Returns the most tokens a completion can have, or None where the law has no end."""
    ends = [lengths.cap] if lengths.cap is not None else []
    if isinstance(lengths, DeterministicLengths):
        ends.append(lengths.tokens)
    elif isinstance(lengths, EmpiricalLengths):
        ends.append(max(lengths.values))
    return min(ends) if ends else None


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


class KvCache(Spec):
    """Bytes of a context token, and what one instance can hold (None: not checked)."""

    per_token_bytes: BoundedBytes = Field(default=0, alias="per_token")
    capacity_bytes: BoundedBytes | None = Field(default=None, alias="capacity")

    @model_validator(mode="after")
    def _both(self) -> Self:
        if self.capacity_bytes is not None and self.per_token_bytes <= 0:
            raise ValueError("capacity needs per_token above zero")
        return self


class RolloutGoals(Spec):
    """What the lambda sweep must respect: mean policy versions behind at completion."""

    max_mean_staleness: float | None = Field(default=None, ge=0, le=1e6)


class RolloutScenario(Spec):
    """One co-located RL loop: generate, update, synchronise, again.

    Attributes:
        prompts: prompts in flight; with `samples_per_prompt` they are the attempts in flight.
        stop_fraction: lambda: the share of the attempts in flight whose completion ends a
            round; 1 waits for all of them.
        ties: what becomes of attempts that finish in the very step in which the round ends:
            "all" counts them in this round, "strict" counts exactly ceil(lambda * attempts)
            and the surplus first in the next round.
        rounds: rounds measured, after the warm-up.
        slots_per_instance: attempts an instance decodes at once; None: all it is given.
        sources: where a number comes from; "assumed: ..." where nothing was published.
    """

    kind: Literal["rollout"] = "rollout"
    name: str = Field(min_length=1)
    description: str = ""
    prompts: Count
    samples_per_prompt: Count = 1
    prompt_tokens: ContextTokens = 0
    lengths: LengthSpec = Field(discriminator="kind")
    stop_fraction: float = Field(default=1.0, alias="lambda", ge=MIN_STOP_FRACTION, le=1)
    ties: Literal["all", "strict"] = "all"
    rounds: Annotated[PositiveInt, Field(le=MAX_ROUNDS)] = 20
    instances: Count = 1
    gpus_per_instance: Count = 1
    slots_per_instance: Count | None = None
    decode: DecodeStep
    switch: Switch = Switch()
    update: Update = Update()
    weight_sync: WeightSync = WeightSync()
    kv: KvCache = KvCache()
    goals: RolloutGoals = RolloutGoals()
    seed: NonNegativeInt = 0
    sources: dict[str, str] = Field(default_factory=dict)

    @property
    def num_attempts(self) -> int:
        """Attempts in flight at the start of every round (N * K)."""
        return self.prompts * self.samples_per_prompt

    @property
    def num_gpus(self) -> int:
        """GPUs of the loop; the update runs on the same ones."""
        return self.instances * self.gpus_per_instance

    @property
    def fixed_s(self) -> float:
        """Seconds of a round that depend neither on lambda nor on any token."""
        switch = self.switch.to_update_s + self.switch.to_generation_s
        return switch + self.update.fixed_s + self.weight_sync.seconds

    @field_validator("update", "weight_sync", mode="before")
    @classmethod
    def _just_a_time(cls, value: Any) -> Any:
        return {"fixed": value} if isinstance(value, (str, int, float)) else value

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
        capacity = self.kv.capacity_bytes
        if capacity is not None:
            most = longest(self.lengths)
            if most is None:
                raise ValueError("kv.capacity needs lengths.cap: a context could outgrow it")
            need = (self.prompt_tokens + most) * self.kv.per_token_bytes
            if need > capacity:
                fits = capacity // self.kv.per_token_bytes - self.prompt_tokens
                raise ValueError(
                    f"one context of {self.prompt_tokens + most} tokens ({need} bytes) is larger "
                    f"than kv.capacity ({capacity} bytes): it could never finish; "
                    + (f"lengths.cap: {fits} would fit" if fits > 0 else "the prompt alone is")
                )
        return self


def load_rollout_scenario(name_or_path: str | Path) -> RolloutScenario:
    """Returns a rollout scenario from a file or from those that ship with the tool.

    Raises:
        InputError: every violation of the file, each with its line and nearest fix.
    """
    return validate(RolloutScenario, _open(name_or_path, ROLLOUT_CATALOG, "rollout scenario"))


def rollout_scenario_from_text(text: str, file: str = "rollout.yaml") -> RolloutScenario:
    """Returns a rollout scenario from YAML text; raises as `load_rollout_scenario` does."""
    return validate(RolloutScenario, parse_yaml(text, file))


def with_stop_fraction(scenario: RolloutScenario, stop_fraction: float) -> RolloutScenario:
    """Returns the scenario at another lambda.

    Raises:
        InputError: lambda outside [0.01, 1].
    """
    if not MIN_STOP_FRACTION <= stop_fraction <= 1:
        raise InputError(
            Violation(
                field="lambda",
                value=f"{stop_fraction:g}",
                rule=f"must be at least {MIN_STOP_FRACTION} and at most 1",
                nearest_fix="1 waits for every attempt; 0.9 parks the slowest tenth",
            )
        )
    return scenario.model_copy(update={"stop_fraction": stop_fraction})
