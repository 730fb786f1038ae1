"""Step time of a pipeline without running its list: bounds on when each stage is done.

Symbols: F_s, B_s forward and backward seconds of stage s, c a hop between stages, m
micro-batches, p stages. Every bound is the length of one path through the lowered list, so
none exceeds the replay's longest path. For a stage s with one forward, one backward:

    work     the first micro-batch comes down, then m (F_s + B_s)
    first    the first micro-batch goes to the last stage and back; then m backwards and the
             forwards that have not run yet
    last     the mirror image: m forwards, then the last micro-batch goes down and back up
    windows  stages a..b wait for each other's results once in b - a + 1 micro-batches, each
             time for sum_{a<=j<=b} (F_j + B_j) + 2 (b - a) c: hops that take time slow the
             steady state

and up from stage s the last gradient still crosses stages s-1..0. Equal stages and free hops
give (m + p - 1)(F + B): the bubble (p - 1)(F + B) of arXiv 2104.04473, and (p - 1)(F + B)/v
with v interleaved chunks. GPipe is exact: two flow shops, each sum + (m - 1) * slowest.
The zero-bubble schedules and those with pairs: closed_form_lists.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array
from flopwright.plan.schedules.actions import ActionKind
from flopwright.plan.schedules.interleaved_1f1b import interleaved_1f1b
from flopwright.simulator.training.candidates import SCHEDULES
from flopwright.simulator.training.closed_form_lists import list_end_seconds

Ints = NDArray[np.int64]

_BY_FORMULA: Final = frozenset({"gpipe", "1f1b", "interleaved_1f1b"})


def stage_end_seconds(
    schedule: int,
    forward_s: Array,
    backward_s: Array,
    hop_s: Array,
    num_microbatches: Ints,
    pp: int,
    weight_s: Array | None = None,
    pair_saving_s: Array | None = None,
) -> Array:
    """Returns seconds from the step's beginning to each stage's last backward, (pp, C).

    Args:
        schedule: index into SCHEDULES.
        forward_s, backward_s: by chunk, (pp * vpp, C); hop_s: from chunk c to c + 1.
        weight_s: the part of backward_s that is weight gradients; 0 if not given.
        pair_saving_s: for schedules that run a forward and a backward as a pair: what it is
            shorter by than its halves apart, by stage and local chunk of the forward and of
            the backward, (pp, vpp, vpp, C); 0 if not given.
    """
    if SCHEDULES[schedule] not in _BY_FORMULA:
        weight = np.zeros_like(backward_s) if weight_s is None else weight_s
        vpp = len(forward_s) // pp
        none = np.zeros((pp, vpp, vpp, backward_s.shape[1]))
        saving = none if pair_saving_s is None else pair_saving_s
        name, inputs = SCHEDULES[schedule], backward_s - weight
        return list_end_seconds(
            name, forward_s, inputs, weight, saving, hop_s, num_microbatches, pp
        )
    m = num_microbatches.astype(float)
    if SCHEDULES[schedule] == "gpipe":
        return _gpipe(forward_s, backward_s, hop_s, m)
    if SCHEDULES[schedule] == "1f1b":
        own = _one_f_one_b(forward_s, backward_s, hop_s, m)
    else:
        own = _interleaved(forward_s, backward_s, hop_s, num_microbatches, pp)
    # A stage cannot be done before the last gradient has come up from those below it.
    rise = _before((backward_s + hop_s)[:pp])
    waiting = np.maximum.accumulate((own + rise)[::-1], axis=0)[::-1]
    return np.asarray(waiting - rise)


def _before(values: Array) -> Array:
    """Returns for each row the sum of the rows before it."""
    return np.asarray(np.cumsum(values, axis=0) - values)


def _gpipe(f: Array, b: Array, hop: Array, m: Array) -> Array:
    """Flow shops: a link carries one micro-batch at a time, like a stage."""
    down = f.sum(axis=0) + hop.sum(axis=0)
    down = down + (m - 1) * np.maximum(f.max(axis=0), hop.max(axis=0))
    below = np.cumsum((b + hop)[::-1], axis=0)[::-1]  # hop of the last chunk is 0
    slowest = np.maximum.accumulate(np.maximum(b, hop)[::-1], axis=0)[::-1]
    return np.asarray(down + below + (m - 1) * slowest)


def _one_f_one_b(f: Array, b: Array, hop: Array, m: Array) -> Array:
    pp = len(f)
    work = f + b
    down = _before(f + hop)
    loop = work + 2 * hop
    below = np.cumsum(loop[::-1], axis=0)[::-1] - work  # from s to the last stage and back
    ends = down + m * work
    for s in range(pp):
        ahead = np.minimum(m, pp - s)
        first = f[s] + below[s] + m * b[s] + (m - ahead) * f[s]
        last = m * f[s] + (m - ahead) * b[s] + below[s] + b[s]
        ends[s] = np.maximum(ends[s], down[s] + np.maximum(first, last))
    return _windows(f, b, hop, m, down, ends)


def _windows(f: Array, b: Array, hop: Array, m: Array, down: Array, ends: Array) -> Array:
    """Raises each stage's end by the round trips that it waits for, with those below it.

    Forward i of stage a runs down to stage b, whose next backward is of micro-batch i -
    (p - 1 - b); that gradient comes up to a, where it stands before forward i + b - a + 1.
    """
    pp = len(f)
    zero = np.zeros((1, f.shape[1]))
    sums = np.concatenate([zero, np.cumsum(f + b, axis=0)])
    hops = np.concatenate([zero, np.cumsum(hop, axis=0)])
    few, which = np.unique(m, return_inverse=True)
    for length in range(2, pp + 1):
        n = pp - length + 1  # stages that are the first of so long a window
        slack, *counts = _trips(few, pp, length)
        trips, left_f, left_b = (c[:, which] for c in counts)
        trip = sums[length:] - sums[:n] + 2 * (hops[length - 1 : -1] - hops[:n])
        end = down[:n] + slack * f[:n] + trips * trip + left_b * b[:n] + left_f * f[:n]
        ends[:n] = np.maximum(ends[:n], np.where(trips > 0, end, 0.0))
    return ends


def _trips(m: Array, pp: int, length: int) -> tuple[Array, Array, Array, Array]:
    """Returns counts of the windows of so many stages, by their first stage and m.

    Forwards that run ahead of the last stage, round trips, and the forwards and backwards that
    the first stage has left behind the last trip.
    """
    a = np.arange(pp - length + 1)[:, None]
    slack = (pp - length - a).astype(float)
    trips = np.floor((m - 1 - slack) / length) + 1
    done = (trips - 1) * length  # the micro-batch whose backward ends the last trip
    return slack, trips, np.maximum(m - done - (pp - a), 0.0), m - 1 - done


def _interleaved(f: Array, b: Array, hop: Array, microbatches: Ints, pp: int) -> Array:
    chunks, columns = f.shape
    vpp = chunks // pp
    m = microbatches.astype(float)
    by_stage_f = f.reshape(vpp, pp, columns).sum(axis=0)
    by_stage_b = b.reshape(vpp, pp, columns).sum(axis=0)
    ends = _before((f + hop)[:pp]) + m * (by_stage_f + by_stage_b)
    from_last = np.cumsum((b + hop)[::-1], axis=0)[::-1]
    down_all = f.sum(axis=0) + hop.sum(axis=0)
    for few in (True, False):
        here = microbatches == pp if few else microbatches != pp
        if not here.any():
            continue
        for s in range(pp):
            started = _forwards_before_backward(s, pp, vpp, few)
            left = m * by_stage_f[s] - started @ f[s::pp]
            deepest = chunks - pp + s
            first = down_all + from_last[deepest] - b[deepest] + m * by_stage_b[s] + left
            ends[s] = np.where(here, np.maximum(ends[s], first), ends[s])
    return np.asarray(ends)


@lru_cache(maxsize=8192)
def _forwards_before_backward(stage: int, pp: int, vpp: int, few: bool) -> Array:
    """Returns how many micro-batches of each local chunk run before the stage's first backward."""
    out = np.zeros(vpp)
    for action in interleaved_1f1b(stage, pp, pp if few else 2 * pp, vpp):
        if action.kind is ActionKind.BACKWARD:
            break
        out[action.chunk // pp] += 1
    return out
