"""Closed forms that layouts must agree with: splits of GPUs, limits of staleness.

Symbols: G GPUs; r tokens/s that one GPU generates, t that one GPU trains. With no tail, no
switch and no sync, two pools in parallel and one pool in turns are equally fast: whatever a
simulation gains or loses by its layout comes from tail, switch or sync.
"""

from __future__ import annotations


def best_rollout_share(generate_rate: float, train_rate: float) -> float:
    """Returns f* = t / (r + t), the share of the GPUs that generates: both sides keep pace."""
    return train_rate / (generate_rate + train_rate)


def loop_rate(gpus: float, generate_rate: float, train_rate: float) -> float:
    """Returns tokens/s of a loop, G r t / (r + t): of the best split, and in turns."""
    return gpus * generate_rate * train_rate / (generate_rate + train_rate)


def split_rate(gpus: float, share: float, generate_rate: float, train_rate: float) -> float:
    """Returns tokens/s of a split with `share` of the GPUs generating: the slower side's."""
    return gpus * min(share * generate_rate, (1 - share) * train_rate)


def queue_staleness(
    concurrent: float, batch: float, queue: float, utilization: float, tail: float
) -> float:
    """Returns the mean versions between the start of a group and its training.

    Updates crossed while it is generated, C M_tail / B (Little, the trainer being the slower
    side: over rho), plus those it waits in the queue: rho where groups come slower than they
    are trained (rho < 1), else (2 q + rho - 1) / (2 rho).
    Source: appliedcompute.com/research/staleness-in-fully-async-rl.

    Args:
        concurrent: C, samples generated at once; batch: B, samples an update consumes.
        queue: q, batches the queue holds.
        utilization: rho, rate of generation over rate of training.
        tail: M_tail, mean time of a group's slowest sample over that of a sample.
    """
    if utilization < 1:
        return concurrent * tail / batch + utilization
    crossed = concurrent * tail / (utilization * batch)
    return crossed + (2 * queue + utilization - 1) / (2 * utilization)
