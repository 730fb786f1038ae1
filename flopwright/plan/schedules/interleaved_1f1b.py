"""Interleaved 1F1B (arXiv 2104.04473, 2.2): each rank holds vpp chunks, a smaller bubble.

Chunk c of the model lives on stage c mod pp. Micro-batches go through a rank's chunks in
groups of pp.

With `overlap`, every stage runs one forward more before its first backward (Kimi K2,
arXiv 2507.20534, 2.4; Megatron-LM's overlap_moe_expert_parallel_comm): on every stage, the
last one included, a forward and the backward after it are then of different micro-batches,
so that the expert all-to-alls of one run behind the other's compute.
"""

from __future__ import annotations

from flopwright.plan.schedules.actions import Action, ActionKind


def interleaved_1f1b(
    stage: int, pp: int, num_microbatches: int, vpp: int, *, overlap: bool = False
) -> tuple[Action, ...]:
    """Returns the compute actions of `stage`; num_microbatches must be a multiple of pp."""
    total = num_microbatches * vpp
    warmup = min(total, 2 * (pp - stage - 1) + (vpp - 1) * pp + overlap)

    def action(kind: ActionKind, step: int, pair: bool = False) -> Action:
        return Action(kind, *slot(kind, step, stage, pp, vpp), overlaps=pair)

    out = [action(ActionKind.FORWARD, i) for i in range(warmup)]
    for i in range(warmup, total):
        out.append(action(ActionKind.FORWARD, i, overlap))
        out.append(action(ActionKind.BACKWARD, i - warmup, overlap))
    out.extend(action(ActionKind.BACKWARD, i) for i in range(total - warmup, total))
    return tuple(out)


def slot(kind: ActionKind, step: int, stage: int, pp: int, vpp: int) -> tuple[int, int]:
    """Returns (chunk, micro-batch) of the `step`-th action of its kind on `stage`.

    Forwards go through the stage's chunks in model order, backwards in reverse, each chunk
    pp micro-batches at a time.
    """
    if vpp == 1:
        return stage, step
    group, within = divmod(step, pp * vpp)
    local, offset = divmod(within, pp)
    if kind is not ActionKind.FORWARD:
        local = vpp - 1 - local
    return local * pp + stage, group * pp + offset
