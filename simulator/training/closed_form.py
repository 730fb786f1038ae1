"""Step time of a pipeline without running its list: bounds that hold stage by stage.

Symbols: F_s, B_s forward and backward seconds of stage s, c a hop between stages, m
micro-batches, p stages. A stage cannot begin before the first micro-batch has come down to
it, works on all m, and after its last backward the gradient still goes up to stage 0:

    T >= sum_{j<s} (F_j + B_j + 2 c) + m (F_s + B_s)                      (work of stage s)

With one forward, one backward, neighbouring stages a..b wait for each other's results once
in b - a + 1 micro-batches; when hops take time this slows the steady state to

    P_ab = (sum_{a<=j<=b} (F_j + B_j) + 2 (b - a) c) / (b - a + 1).

Equal stages and free hops give (m + p - 1)(F + B): the bubble (p - 1)(F + B) of
arXiv 2104.04473, and (p - 1)(F + B) / v with v interleaved chunks. GPipe is exact: two flow
shops, each sum + (m - 1) * slowest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array
from flopwright.simulator.training.candidates import SCHEDULES

Ints = NDArray[np.int64]


def pipeline_seconds(
    schedule: int,
    forward_s: Array,
    backward_s: Array,
    hop_s: Array,
    num_microbatches: Ints,
    pp: int,
) -> Array:
    """Returns seconds from the first forward to stage 0's last backward, by candidate.

    Args:
        schedule: index into SCHEDULES.
        forward_s, backward_s: by chunk, (pp * vpp, C); hop_s: from chunk c to c + 1.
    """
    m = num_microbatches.astype(float)
    if SCHEDULES[schedule] == "gpipe":
        return _gpipe(forward_s, backward_s, hop_s, m)
    if SCHEDULES[schedule] == "1f1b":
        return _one_f_one_b(forward_s, backward_s, hop_s, m)
    return _interleaved(forward_s, backward_s, hop_s, m, pp)


def _gpipe(f: Array, b: Array, hop: Array, m: Array) -> Array:
    """Flow shops: a link carries one micro-batch at a time, like a stage."""
    slowest_f = np.maximum(f.max(axis=0), hop.max(axis=0))
    slowest_b = np.maximum(b.max(axis=0), hop.max(axis=0))
    through = f.sum(axis=0) + b.sum(axis=0) + 2 * hop.sum(axis=0)
    return np.asarray(through + (m - 1) * (slowest_f + slowest_b))


def _before(values: Array) -> Array:
    """Returns for each row the sum of the rows before it."""
    return np.asarray(np.cumsum(values, axis=0) - values)


def _one_f_one_b(f: Array, b: Array, hop: Array, m: Array) -> Array:
    pp = len(f)
    work = f + b
    fill = _before(work + 2 * hop)  # to stage s and back
    below = (work + 2 * hop).sum(axis=0) - fill - work  # from s to the last stage and back
    total = np.max(fill + m * work, axis=0)
    for s in range(pp):
        ahead = np.minimum(m, pp - s)
        # first backward at s, then m backwards and the forwards that are left; and mirrored
        first = fill[s] + f[s] + below[s] + m * b[s] + (m - ahead) * f[s]
        last = fill[s] + m * f[s] + (m - ahead) * b[s] + below[s] + b[s]
        total = np.maximum(total, np.maximum(first, last))
    sums = np.concatenate([np.zeros((1, f.shape[1])), np.cumsum(work, axis=0)])
    hops = np.concatenate([np.zeros((1, f.shape[1])), np.cumsum(hop, axis=0)])
    for length in range(2, pp + 1):
        a = np.arange(pp - length + 1)
        period = (sums[a + length] - sums[a] + 2 * (hops[a + length - 1] - hops[a])) / length
        slack = (pp - length - a).astype(float)[:, None]  # forwards that run ahead of stage b
        steady = fill[a] + slack * work[a] + (m - slack) * period
        total = np.maximum(total, np.where(m > slack, steady, 0.0).max(axis=0))
    return np.asarray(total)


def _interleaved(f: Array, b: Array, hop: Array, m: Array, pp: int) -> Array:
    chunks, columns = f.shape
    vpp = chunks // pp
    work = (f + b).reshape(vpp, pp, columns).sum(axis=0)
    first = (f + b + 2 * hop)[:pp]
    total = np.max(_before(first) + m * work, axis=0)
    # the first micro-batch goes through every chunk and back
    return np.asarray(np.maximum(total, (f + b + 2 * hop).sum(axis=0)))


def stage_finish_lead(backward_s: Array, hop_s: Array, pp: int) -> Array:
    """Returns how long before stage 0 each stage ends its last backward, (pp, C)."""
    return _before((backward_s + hop_s)[:pp])
