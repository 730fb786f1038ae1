"""Step time fitted to an engine's own log: a + c * sequences + kappa * context, with spread.

Weighted least squares in relative error under the physical bounds that no term is negative.
What the samples cannot tell apart (one batch, one context) stays at its prior.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.ops import Array
from flopwright.simulator.calibration.interval import student_t_quantile
from flopwright.simulator.rollouts.engine.logs import EngineSample
from flopwright.spec.rollouts.engine import StepTable

# Weight of the prior: it counts as one sample whose terms are known to this many e-folds.
PRIOR_LOG_STD = 0.7


@dataclass(frozen=True, slots=True)
class StepFit:
    """A fitted law and how sure it is.

    Attributes:
        per_step_s, per_attempt_s, per_context_token_s: a, c, kappa.
        covariance: of the three, 3 x 3.
        residual_log: standard deviation of log(measured / fitted) over the samples.
        samples: how many; dof: what is left of them after the fit.
    """

    per_step_s: float
    per_attempt_s: float
    per_context_token_s: float
    covariance: Array
    residual_log: float
    samples: int
    dof: float

    @property
    def coefficients(self) -> Array:
        """The three numbers in one array."""
        return np.array([self.per_step_s, self.per_attempt_s, self.per_context_token_s])

    def table(self) -> StepTable:
        """Returns the law as a step table."""
        return StepTable.linear(*(float(x) for x in self.coefficients))

    def seconds(self, running: float, context_tokens: float) -> float:
        """Returns the fitted seconds of a step."""
        return float(self.coefficients @ np.array([1.0, running, context_tokens]))

    def interval(
        self, running: float, context_tokens: float, level: float = 0.8
    ) -> tuple[float, float]:
        """Returns the interval in which a measured step of this load falls so often.

        The spread of the fit at the load and that of single samples, in logs.
        """
        at = np.array([1.0, running, context_tokens])
        middle = float(self.coefficients @ at)
        of_fit = math.sqrt(max(float(at @ self.covariance @ at), 0.0)) / middle
        spread = math.hypot(of_fit, self.residual_log)
        half = student_t_quantile(0.5 + level / 2, max(self.dof, 1.0)) * spread
        return middle * math.exp(-half), middle * math.exp(half)


def fit_steps(samples: Sequence[EngineSample], prior: Sequence[float] | None = None) -> StepFit:
    """Returns the law of the samples.

    Args:
        prior: (a, c, kappa) of a prediction; each term is held to it to within a factor of
            about two, so that what the log does not tell stays as predicted.

    Raises:
        InputError: fewer samples than there are terms and no prior, or none at all.
    """
    if not samples or (prior is None and len(samples) < 3):
        raise InputError(
            Violation(
                field="log",
                value=f"{len(samples)} samples",
                rule="a law of three terms needs three samples, or one and a prediction",
            )
        )
    loads = np.array([[1.0, s.running, s.context_tokens] for s in samples])
    measured = np.array([s.step_s for s in samples])
    rows, target = loads / measured[:, None], np.ones(len(samples))
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    noise, found = 0.1, np.zeros(3)
    for _ in range(4):  # the prior's weight depends on the noise that it helps to find
        extra, aims = _prior_rows(prior, noise, scale)
        system = np.vstack([rows / scale, extra])
        found = _non_negative(system, np.concatenate([target, aims])) / scale
        rest = np.log((loads @ found) / measured)
        dof = max(len(samples) - (0.0 if prior is not None else 3.0), 1.0)
        noise = max(float(np.sqrt(np.sum(rest**2) / dof)), 1e-6)
    inverse = np.linalg.pinv(system.T @ system) * noise**2
    covariance = inverse / np.outer(scale, scale)
    a, c, kappa = (float(x) for x in found)
    return StepFit(a, c, kappa, covariance, noise, len(samples), dof)


def _non_negative(system: Array, aims: Array) -> Array:
    """Returns the least-squares solution with no term below zero.

    With so few terms every set of terms that stand at zero is tried: the best of those whose
    others are not negative is the optimum.
    """
    terms = system.shape[1]
    best, least = np.zeros(terms), float(aims @ aims)
    for count in range(1, terms + 1):
        for kept in itertools.combinations(range(terms), count):
            found = np.zeros(terms)
            found[list(kept)] = np.linalg.lstsq(system[:, kept], aims, rcond=None)[0]
            rest = float(np.sum((system @ found - aims) ** 2))
            if (found >= 0).all() and rest < least:
                best, least = found, rest
    return best


def _prior_rows(prior: Sequence[float] | None, noise: float, scale: Array) -> tuple[Array, Array]:
    """Returns rows that hold each term to its prior, in units of the samples' noise."""
    if prior is None:
        return np.zeros((0, 3)), np.zeros(0)
    values = np.asarray(prior, float)
    known = values > 0
    weight = np.where(known, noise / (PRIOR_LOG_STD * np.where(known, values, 1.0)), 0.0)
    return np.diag(weight / scale), weight * values
