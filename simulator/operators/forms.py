"""The share of the peak that a kernel class reaches at a shape: one form for all of them."""

from __future__ import annotations

import numpy as np

from flopwright.ops import Array
from flopwright.simulator.calibration.model import EfficiencyCurve


def efficiency(
    curve: EfficiencyCurve,
    m: Array,
    k: Array,
    n: Array,
    *,
    rows: Array | None = None,
    flops: Array | None = None,
) -> Array:
    """Returns the share of the peak that the curve's kernel class reaches, from 0 to 1.

    max_efficiency * sustained * m/(m+half_m) * k/(k+half_k) * n/(n+half_n), times
    rows/(rows+half_rows) and (1 + flops/decline_flops) ** -decline_power where a curve has
    them. Every factor is at most 1, so the roofline of the peak is never beaten.

    Args:
        curve: the kernel class.
        m, k, n: problem shape.
        rows: rows of all heads together (batch * m); only attention needs them.
        flops: work of one call; only a curve that declines with it needs it.
    """
    shape = np.broadcast_shapes(m.shape, k.shape, n.shape)
    share = np.full(shape, curve.max_efficiency * curve.sustained)
    for size, half in ((m, curve.half_m), (k, curve.half_k), (n, curve.half_n)):
        if half > 0:
            share = share * (size / (size + half))
    if curve.half_rows > 0 and rows is not None:
        share = share * (rows / (rows + curve.half_rows))
    if curve.decline_power > 0 and flops is not None:
        share = share * (1 + flops / curve.decline_flops) ** -curve.decline_power
    return share
