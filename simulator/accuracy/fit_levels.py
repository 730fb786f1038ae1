"""Which scalars a run shares with which others: levels, each shrunk to the one above it.

A scalar of a run (fit_step.SLOTS) is a link of a sum of terms: one of its kernel class, one
of its GPU, one of its software stack, each with a normal prior around 0 (around a named
value for the topmost). Terms are keyed by what a GPU, a link, a kernel class or a stack is;
nothing is keyed by a row or a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array
from flopwright.simulator.accuracy.fit_bayes import Posterior, robust_map
from flopwright.simulator.accuracy.fit_step import (
    COMMS,
    ENDS,
    HOSTS,
    KERNELS,
    SLOT,
    SLOTS,
    StepArrays,
    step_seconds,
)

Ints = NDArray[np.int64]
Rows = NDArray[Any] | slice
ALL: Final = slice(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One level of some scalars.

    Attributes:
        level: its name, such as "gpu" or "stack host".
        slots: scalars that share it.
        by: label of the run whose values it tells apart; "" is one for all runs. A run
            whose label is empty has no such term.
        std: spread of its prior, in logarithms ("x", "s") or logits ("hide").
    """

    level: str
    slots: tuple[str, ...]
    by: str
    std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Parameters and which of them each scalar of each run is made of.

    Attributes:
        names: of the parameters, "level|label".
        std: spreads of their priors, (P,).
        base: the scalars where all parameters are 0, after the link, (SLOTS,).
        index: parameters of each run's scalars, (R, SLOTS, L); P where there is none.
    """

    names: tuple[str, ...]
    std: Array
    base: Array
    index: Ints

    def values(self, theta: Array, rows: Rows = ALL) -> Array:
        """Returns the scalars of the runs, (R, SLOTS)."""
        return linked(self.raw(theta, rows))

    def raw(self, theta: Array, rows: Rows = ALL) -> Array:
        """Returns the scalars before their links, (R, SLOTS)."""
        padded = np.append(theta, 0.0)
        return np.asarray(self.base + padded[self.index[rows]].sum(axis=2))

    def log_steps(self, theta: Array, arrays: StepArrays, rows: Rows = ALL) -> tuple[Array, Array]:
        """Returns (log step seconds (R,), their derivative by the parameters (R, P))."""
        index = self.index[rows]
        values = self.values(theta, rows)
        seconds, by_value = step_seconds(arrays, values)
        slope = by_value * _link_slope(values) / seconds[:, None]
        out = np.zeros((len(arrays), len(theta) + 1))
        each = np.arange(len(arrays))
        for slot in range(len(SLOTS)):
            for level in range(index.shape[2]):
                out[each, index[:, slot, level]] += slope[:, slot]
        return np.log(seconds), out[:, :-1]


def design(
    terms: Sequence[Term],
    labels: Sequence[Mapping[str, str]],
    base: Array,
    active: NDArray[np.bool_] | None = None,
) -> Design:
    """Returns the parameters that the runs with these labels need.

    Args:
        base: scalars (not linked) of a run about which nothing is known, (SLOTS,).
        active: which scalars a run's step depends on, (R, SLOTS); None is all. A term that
            no run depends on is not there.
    """
    if active is None:
        active = np.ones((len(labels), len(SLOTS)), bool)
    names: dict[str, int] = {}
    spreads: list[float] = []
    depth = max(sum(slot in t.slots for t in terms) for slot in SLOTS)
    index = np.full((len(labels), len(SLOTS), depth), -1, np.int64)
    used = [0] * len(SLOTS)
    for term in terms:
        for row, label in enumerate(labels):
            if term.by and not label[term.by]:
                continue
            mine = [SLOT[slot] for slot in term.slots if active[row, SLOT[slot]]]
            if not mine:
                continue
            name = f"{term.level}|{label[term.by] if term.by else ''}"
            if name not in names:
                names[name] = len(names)
                spreads.append(term.std)
            for place in mine:
                index[row, place, used[place]] = names[name]
        for slot in term.slots:
            used[SLOT[slot]] += 1
    index[index < 0] = len(names)
    return Design(names=tuple(names), std=np.array(spreads), base=base, index=index)


def active_scalars(arrays: StepArrays) -> NDArray[np.bool_]:
    """Returns which scalars each run's step depends on, (R, SLOTS)."""
    out = np.zeros((len(arrays), len(SLOTS)), np.bool_)
    end = arrays.end.max(axis=1) > 0
    by_chunk = (
        (KERNELS, "x ", arrays.kernel),
        (COMMS, "x ", arrays.comm),
        (COMMS, "hide ", arrays.comm),
        (HOSTS, "s host ", arrays.layers),
    )
    for names, prefix, values in by_chunk:
        out[:, [SLOT[prefix + name] for name in names]] = values.max(axis=1) > 0
    reduce, gather, update, offload = (end[:, ENDS.index(name)] for name in ENDS)
    out[:, SLOT["x dp_comm"]] = reduce | gather
    out[:, SLOT["hide dp_comm"]] = reduce | gather
    out[:, SLOT["x optimizer"]] = update
    out[:, SLOT["x offload"]] = offload
    out[:, SLOT["x pp_comm"]] = arrays.hop > 0
    out[:, SLOT["s constant"]] = True
    out[:, SLOT["s dp_rank"]] = arrays.dp_ranks > 1
    return out


def linked(raw: Array) -> Array:
    """Returns scalars from the sums of their terms: exp, or the logistic of a share."""
    share = np.array([name.startswith("hide") for name in SLOTS])
    return np.asarray(np.where(share, 1 / (1 + np.exp(-raw)), np.exp(np.clip(raw, -60, 20))))


def unlinked(values: Array) -> Array:
    """Returns the sums whose links are `values`."""
    share = np.array([name.startswith("hide") for name in SLOTS])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(share, np.log(values / (1 - values)), np.log(values)))


def _link_slope(values: Array) -> Array:
    share = np.array([name.startswith("hide") for name in SLOTS])
    return np.asarray(np.where(share, values * (1 - values), values))


# Scale of the residuals in the fit: what decides how far terms are shrunk.
_SIGMA: Final = 0.05
# Scatter of runs around a fit that left their cell out, beside what is not known of its terms:
# wider than the scale above, so that the 80 % interval of such a run covers about that much.
SCATTER: Final = 0.07
# A parameter whose variance is that of its prior, and which stays at 0, is not free.
_UNDECIDED: Final = 0.999
_UNMOVED: Final = 1e-3


@dataclass(frozen=True, slots=True)
class LevelFit:
    """A fit of a design to measured step times."""

    design: Design
    posterior: Posterior
    sigma: float

    def decided(self) -> NDArray[np.bool_]:
        """Returns which parameters the runs moved or narrowed; the others are their priors."""
        share = np.diag(self.posterior.covariance) / self.design.std**2
        return np.asarray((share < _UNDECIDED) | (np.abs(self.posterior.theta) > _UNMOVED))

    def effective_parameters(self) -> float:
        """Returns how many parameters the data decided: sum of 1 - posterior / prior variance."""
        share = np.diag(self.posterior.covariance) / self.design.std**2
        return float((1 - share).sum())


def fit_levels(
    plan: Design,
    arrays: StepArrays,
    measured_s: Array,
    weights: Array,
    sigma: float = _SIGMA,
    start: Array | None = None,
) -> LevelFit:
    """Returns the most probable parameters given measured step times.

    Args:
        weights: of each run; 0 leaves it out.
        sigma: scatter of log(measured / predicted) inside a stack.
        start: parameters to begin at; None is 0.
    """
    keep = np.flatnonzero(weights > 0)
    target, part = np.log(measured_s[keep]), arrays.take(keep)

    def residuals(theta: Array) -> tuple[Array, Array]:
        logs, jacobian = plan.log_steps(theta, part, keep)
        return logs - target, jacobian

    zero = np.zeros(len(plan.names))
    first = zero if start is None else start
    found = robust_map(residuals, weights[keep], sigma, zero, plan.std, first)
    return LevelFit(plan, found, sigma)
