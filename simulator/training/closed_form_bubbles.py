"""Step times of equal chunks with free hops, in closed form: oracles of the replay.

Symbols: p stages of v chunks, m micro-batches; F, I, W seconds of a chunk's forward, input
gradient and weight gradient, B = I + W. A stage works m v (F + B); the bubble is what the
last stage to be done takes longer than that:

    gpipe, 1f1b          (p - 1) (F + B)                  arXiv 2104.04473, 2.2.1
    interleaved, also
    with overlap         (p - 1) (F + B)                  arXiv 2104.04473, 2.2.2 (F, B of a chunk)
    zb_h1                (p - 1) max(F, I, F + I - W)     m >= p
    zb_v                 (p - 1) max(I, 2 (I - W))        m >= 2 p - 1, F <= I, W <= I
    dualpipe_v           (p - 1) (2 F + max(I - W, 0))    m >= 2 p, F >= I, pairs save nothing

W <= F and W <= I turn the third into (p - 1) (F + I - W) of arXiv 2401.10241, table 1; F = I
turns the last into (p - 1) (F&B + B - 3 W) of the README of deepseek-ai/DualPipe with
F&B = F + B. The paper counts a ZB-V of F = I = W as free of bubbles, as every stage works
without a gap; the (p - 1) F here are the last stage's later beginning. The maxima extend the
published formulas to unequal F, I and W; tests hold them equal to the replay.
"""

from __future__ import annotations

from flopwright.plan.schedules.placement import ScheduleName


def equal_chunks_seconds(
    schedule: ScheduleName,
    pp: int,
    vpp: int,
    num_microbatches: int,
    seconds: tuple[float, float, float],
) -> float | None:
    """Returns seconds until every stage is done, or None outside the formula's conditions.

    Args:
        seconds: of one chunk and micro-batch: forward, input gradient, weight gradient.
    """
    bubble = bubble_seconds(schedule, pp, num_microbatches, seconds)
    return None if bubble is None else vpp * num_microbatches * sum(seconds) + bubble


def bubble_seconds(
    schedule: ScheduleName, pp: int, num_microbatches: int, seconds: tuple[float, float, float]
) -> float | None:
    """Returns the bubble of equal chunks, or None outside the formula's conditions."""
    forward, inputs, weight = seconds
    m = num_microbatches
    if schedule == "zb_h1":
        each = max(forward, inputs, forward + inputs - weight) if m >= pp else None
    elif schedule == "zb_v":
        stated = m >= 2 * pp - 1 and forward <= inputs and weight <= inputs
        each = max(inputs, 2 * (inputs - weight)) if stated else None
    elif schedule == "dualpipe_v":
        stated = m >= 2 * pp and forward >= inputs
        each = 2 * forward + max(inputs - weight, 0.0) if stated else None
    else:
        each = sum(seconds)
    return None if each is None else (pp - 1) * each


def dualpipe_idle_seconds(pp: int, chunk_s: float, pair_s: float) -> float:
    """Returns the idle time of DualPipe-V's last stage, F = I = W = chunk_s, m >= 2 pp.

    (p - 1) (F&B + B - 3 W), README of deepseek-ai/DualPipe, with F&B = pair_s between B and
    F + B: pairs that hide communication shorten the bubble too.
    """
    return (pp - 1) * (pair_s + 2 * chunk_s - 3 * chunk_s)
