"""What measured rollout rounds and stages say: decode steps, lengths, synchronisation, phases.

The same method as for training steps: positive terms with priors, robust, with uncertainty.
A decode step is `a + c * active attempts + kappa * context tokens`, a synchronisation
`alpha + bytes / bandwidth`, an update `fixed + per token`; lengths follow one of the laws of
spec/rollouts/lengths.py, cut where attempts had to stop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flopwright.errors import InputError
from flopwright.report.metrics import Interval, RoundMetrics, StageMetrics
from flopwright.report.records import RoundSample
from flopwright.simulator.calibration.fit_lengths import LengthFit as LengthFit
from flopwright.simulator.calibration.fit_lengths import fit_lengths as fit_lengths
from flopwright.simulator.calibration.positive_fit import PositiveFit, fit_positive
from flopwright.spec.rollouts.scenario import DecodeStep

# Phases that grow with what a round trained on or generated; the others take their time.
_PER_TOKEN = frozenset({"generation", "update", "log_probs", "reward"})


def fit_decode(
    batch: ArrayLike,
    context_tokens: ArrayLike,
    seconds: ArrayLike,
    guess: Mapping[str, float] | None = None,
) -> PositiveFit:
    """Returns the decode step's terms: "a", "c" an attempt, "kappa" a token of context.

    Args:
        batch: active attempts of each timed step; context_tokens: over all of them.
        guess: the terms as they were known before.
    """
    terms = {"a": np.ones(np.shape(seconds)), "c": batch, "kappa": context_tokens}
    return fit_positive(terms, seconds, guess)


def decode_step(fit: PositiveFit) -> DecodeStep:
    """Returns a fit of `fit_decode` as a scenario states it."""
    found = fit.by_name
    return DecodeStep.model_validate(
        {name: f"{found[of]:.9g} s" for name, of in
         (("per_step", "a"), ("per_attempt", "c"), ("per_context_token", "kappa"))}
    )  # fmt: skip


def fit_sync(nbytes: ArrayLike, seconds: ArrayLike) -> PositiveFit:
    """Returns a synchronisation's terms: "alpha" seconds, "per_byte" seconds a byte."""
    return fit_positive({"alpha": np.ones(np.shape(seconds)), "per_byte": nbytes}, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFit:
    """Phases of a round, each a fit: of "fixed", and "per_token" where it was seen to grow."""

    phases: dict[str, PositiveFit] = field(default_factory=dict)

    def predict(self, tokens: float) -> dict[str, float]:
        """Returns seconds by phase of a round that generates `tokens`."""
        return {n: float(f.predict(*_terms(f, tokens))) for n, f in self.phases.items()}

    def interval(self, tokens: float, probability: float = 0.8) -> Interval:
        """Returns the interval of the whole round; phases scatter by themselves."""
        centre = sum(self.predict(tokens).values())
        parts = [f.interval(*_terms(f, tokens), probability=probability)
                 for f in self.phases.values()]  # fmt: skip
        halves = [(p.high - p.low) / 2 for p in parts]
        half = float(np.sqrt(np.square(halves).sum()))
        return Interval(low=max(centre - half, 0.0), high=centre + half, probability=probability)


def _terms(fit: PositiveFit, tokens: float) -> tuple[float, ...]:
    return (1.0, tokens) if len(fit.names) == 2 else (1.0,)


def fit_rounds(rounds: Sequence[RoundMetrics | RoundSample]) -> RoundFit:
    """Returns how long each phase of a round takes, from measured rounds of one set-up.

    Raises:
        InputError: fewer than two rounds.
    """
    if len(rounds) < 2:
        raise InputError("two measured rounds at least are needed to fit their phases")
    tokens = np.array([float(r.generated_tokens or 0.0) for r in rounds])
    varies = tokens.min() > 0 and tokens.max() > 1.05 * tokens.min()
    names = list(dict.fromkeys(n for r in rounds for n, s in r.time_s.items() if s > 0))
    phases = {}
    for name in names:
        seconds = np.array([r.time_s.get(name, 0.0) for r in rounds])
        seen = seconds > 0
        if seen.sum() < 2:
            continue
        terms: dict[str, Any] = {"fixed": np.ones(int(seen.sum()))}
        if varies and name in _PER_TOKEN:
            terms["per_token"] = tokens[seen]
        phases[name] = fit_positive(terms, seconds[seen])
    return RoundFit(phases=phases)


def fit_stages(
    measured: Sequence[StageMetrics], predicted: Mapping[str, float]
) -> dict[str, PositiveFit]:
    """Returns, by stage, what its predicted wall time has to be multiplied by ("factor").

    Args:
        measured: stages of one or several campaigns; those measured once are left out.
        predicted: wall seconds by stage.
    """
    found: dict[str, list[float]] = {}
    for stage in measured:
        if stage.stage in predicted and stage.wall_s > 0:
            found.setdefault(stage.stage, []).append(stage.wall_s)
    return {
        name: fit_positive({"factor": np.full(len(walls), predicted[name])}, walls)
        for name, walls in found.items()
        if len(walls) > 1
    }
