"""From timed points to curves: one operator class, one collective.

Everything is fitted in the logarithm of seconds, because timing noise is a factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from flopwright.report.probe import CollectivePoint, OperatorPoint
from flopwright.simulator.calibration.least_squares import Array, Prior, robust_fit
from flopwright.simulator.calibration.model import CollectiveCurve, EfficiencyCurve
from flopwright.simulator.operators.variants import family_of

# Scatter of one timed point around a right curve (log): what medians on a busy machine show.
_POINT_NOISE: Final = 0.15
# Sizes at which a dimension halves the rate, before anything was measured: 16, to a factor 5.
_HALF_LOG, _HALF_LOG_STD = np.log(16.0), np.log(5.0)
# A rate or bandwidth is known to a factor 3 before it is measured, a floor to a factor 4.
_RATE_LOG_STD, _FLOOR_LOG_STD = np.log(3.0), np.log(4.0)
_SHAPED: Final = ("gemm", "grouped_gemm", "attention", "kda")
# Payloads from which a collective's time is mostly its bandwidth.
_LARGE_BYTES: Final = 2**20


def fit_operator(
    points: Sequence[OperatorPoint], *, peak_flops_per_s: float, bytes_per_s: float, floor_s: float
) -> EfficiencyCurve:
    """Returns the curve of one kind, dtype and phase.

    Args:
        points: at least one, all of the same kind, dtype and phase.
        peak_flops_per_s: what efficiency 1 means; raised if the fit lies above it.
        bytes_per_s, floor_s: first guesses, from plain copies and from an empty call.
    """
    if points[0].kind in _SHAPED:
        return _fit_shaped(points, peak_flops_per_s, bytes_per_s, floor_s)
    return _fit_streaming(points, bytes_per_s, floor_s)


def _columns(points: Sequence[OperatorPoint], *names: str) -> list[Array]:
    return [np.array([float(getattr(p, name)) for p in points]) for name in names]


def _fit_shaped(
    points: Sequence[OperatorPoint], peak: float, bytes_per_s: float, floor_s: float
) -> EfficiencyCurve:
    m, k, n, flops, moved, seconds = _columns(
        points, "m", "k", "n", "flops", "moved_bytes", "seconds"
    )
    log_seconds = np.log(seconds)

    def modelled(p: Array) -> Array:
        top, half_m, half_k, half_n, bandwidth, floor = np.exp(p)
        rate = top * m / (m + half_m) * k / (k + half_k) * n / (n + half_n)
        return np.asarray(floor + np.maximum(flops / rate, moved / bandwidth))

    prior = Prior(
        mean=np.array(
            [np.log(0.5 * peak), *[_HALF_LOG] * 3, np.log(2 * bytes_per_s), np.log(floor_s)]
        ),
        std=np.array([_RATE_LOG_STD, *[_HALF_LOG_STD] * 3, _RATE_LOG_STD, _FLOOR_LOG_STD]),
    )
    noise = np.full(len(points), _POINT_NOISE)
    # Several starts: which of two dimensions limits the rate is a choice between valleys.
    starts = [prior.mean + np.array([0, *h, 0, 0]) for h in _STARTS]
    fits = [
        robust_fit(lambda p: np.log(modelled(p)) - log_seconds, s, prior, noise) for s in starts
    ]
    best = min(fits, key=lambda f: f.cost)
    # Once more with the scatter that was found: late runs are one-sided, and the tighter
    # the bound beyond which they count less, the less they pull.
    best = robust_fit(
        lambda p: np.log(modelled(p)) - log_seconds,
        best.params,
        prior,
        noise * min(1.0, max(_typical(best.residuals) / _POINT_NOISE, 0.2)),
    )
    top, half_m, half_k, half_n, bandwidth, floor = (float(v) for v in np.exp(best.params))
    peak = max(peak, top)
    return EfficiencyCurve(
        kind=points[0].kind,
        dtype=points[0].dtype,
        phase=points[0].phase,
        peak_flops_per_s=peak,
        max_efficiency=top / peak,
        half_m=half_m,
        half_k=half_k,
        half_n=half_n,
        bytes_per_s=bandwidth,
        floor_s=floor,
        residual_log=_scatter(best.residuals),
        points=len(points),
        domain={
            "m": (float(m.min()), float(m.max())),
            "k": (float(k.min()), float(k.max())),
            "n": (float(n.min()), float(n.max())),
        },
    )


_STARTS: Final = ((0.0, 0.0, 0.0), (2.0, -2.0, -2.0), (-2.0, 2.0, -2.0), (-2.0, -2.0, 2.0))


def _fit_streaming(
    points: Sequence[OperatorPoint], bytes_per_s: float, floor_s: float
) -> EfficiencyCurve:
    m, moved, seconds = _columns(points, "m", "moved_bytes", "seconds")
    fit = robust_fit(
        lambda p: np.log(np.exp(p[1]) + moved / np.exp(p[0])) - np.log(seconds),
        np.log([bytes_per_s, floor_s]),
        Prior(mean=np.log([bytes_per_s, floor_s]), std=np.array([_RATE_LOG_STD, _FLOOR_LOG_STD])),
        # What takes longer weighs more: the sum over a layer is what has to be right.
        _POINT_NOISE * np.clip(np.median(seconds) / seconds, 0.25, 4.0) ** 0.5,
    )
    bandwidth, floor = (float(v) for v in np.exp(fit.params))
    return EfficiencyCurve(
        kind=points[0].kind,
        dtype=points[0].dtype,
        phase=points[0].phase,
        family=family_of(points[0].name) if points[0].kind == "memory_bound" else "",
        bytes_per_s=bandwidth,
        floor_s=floor,
        residual_log=_scatter(fit.residuals),
        points=len(points),
        domain={"m": (float(m.min()), float(m.max()))},
    )


def fit_collective(points: Sequence[CollectivePoint], link: str) -> CollectiveCurve:
    """Returns alpha + bytes / bandwidth of one collective between one number of ranks.

    Args:
        points: their `seconds` should come from quick runs: medians of small messages are
            the scheduler's, not the network's (fit_probe.py).
        link: name of the link between the ranks.
    """
    nbytes = np.array([p.nbytes for p in points])
    seconds = np.array([p.seconds for p in points])
    guess = np.log([seconds.min(), (nbytes / seconds).max()])
    fit = robust_fit(
        lambda p: np.log(np.exp(p[0]) + nbytes / np.exp(p[1])) - np.log(seconds),
        guess,
        Prior(mean=guess, std=np.array([_FLOOR_LOG_STD, _RATE_LOG_STD])),
        # Large payloads decide the bandwidth and are measured better than the scheduler's mood.
        np.where(nbytes >= _LARGE_BYTES, _POINT_NOISE, 2 * _POINT_NOISE),
    )
    alpha, bandwidth = (float(v) for v in np.exp(fit.params))
    return CollectiveCurve(
        collective=points[0].collective,
        link=link,
        ranks=points[0].ranks,
        alpha_s=alpha,
        bytes_per_s=bandwidth,
        residual_log=_scatter(fit.residuals),
        points=len(points),
        domain_bytes=(float(nbytes.min()), float(nbytes.max())),
    )


def _typical(residuals: Array) -> float:
    """Returns the deviation of most residuals: 1.48 times their median size."""
    return float(1.4826 * np.median(np.abs(residuals)))


def _scatter(residuals: Array) -> float:
    return float(np.sqrt(np.mean(residuals**2)))
