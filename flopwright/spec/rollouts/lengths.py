"""How long completions are: the laws a scenario can name, and what shifts them."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from flopwright.spec.base import Grown, Spec
from flopwright.units import Seconds, Tokens

MAX_ATTEMPTS: Final = 1_000_000
MAX_PHASE_S: Final = 86_400.0

# Bounds beyond any real loop, within which every sum stays finite and every run ends.
Count = Annotated[PositiveInt, Field(le=MAX_ATTEMPTS)]
ContextTokens = Annotated[Tokens, Field(le=1_000_000_000)]
PositiveTokens = Annotated[Tokens, Field(gt=0, le=1_000_000_000)]
PhaseSeconds = Annotated[Seconds, Field(le=MAX_PHASE_S)]


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


class LognormalLengths(_Lengths, Grown):
    """log L is normal with standard deviation `sigma`.

    Attributes:
        mean: of L before the cap; with `mean_of: clipped` of what is left after it, which is
            what a run reports: the location is solved for.
    """

    later_fields: ClassVar[tuple[str, ...]] = ("mean_of",)

    kind: Literal["lognormal"] = "lognormal"
    mean: PositiveTokens
    sigma: float = Field(ge=0.001, le=10)
    mean_of: Literal["law", "clipped"] = "law"

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.mean_of == "clipped":
            if self.cap is None:
                raise ValueError("mean_of: clipped needs a cap")
            if self.mean > 0.995 * self.cap:
                raise ValueError(
                    f"the mean after the cap ({self.mean}) must stay below it ({self.cap})"
                )
        return self


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


class Drift(Spec):
    """Lengths that change as training goes on.

    Attributes:
        per_round: factor a round: an attempt submitted at policy version v is
            per_round ** v times as long (before the cap).
        at_most: where the factor stops growing, or at_least: falling.
    """

    per_round: float = Field(default=1.0, ge=0.5, le=2.0)
    at_most: float = Field(default=1e3, ge=1, le=1e6)
    at_least: float = Field(default=1e-3, gt=0, le=1)

    def factor(self, version: int) -> float:
        """Returns the factor of attempts submitted at a policy version."""
        exponent = version * math.log(self.per_round)
        low, high = math.log(self.at_least), math.log(self.at_most)
        return math.exp(min(max(exponent, low), high))


class EffortBudget(Spec):
    """A budget on thinking tokens: tau times the base length; beyond it the reward is -1.

    A length effect: what reaches the budget is cut there, and its share is reported.
    """

    base: PositiveTokens
    tau: float = Field(gt=0, le=1000)

    @property
    def tokens(self) -> int:
        """The budget in whole tokens, at least one."""
        return max(1, math.floor(self.tau * self.base))


class VerbosityLimit(Spec):
    """Candidates longer than sigma times the base length lose every comparison.

    They are generated to their end all the same; their share is reported.
    """

    base: PositiveTokens
    sigma: float = Field(gt=0, le=1000)

    @property
    def tokens(self) -> int:
        """The most tokens of a candidate that does not lose of itself."""
        return max(1, math.floor(self.sigma * self.base))
