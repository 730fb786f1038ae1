"""Which hidden states travel between the chunks of a pipeline.

With attention residuals a chunk reads the sums of all finished blocks beside the running one. A
stage keeps those that came to it, or were finished on it, with an earlier chunk (cache-based
pipeline communication, arXiv 2607.24653): into its next chunk only newer ones travel, whatever
the schedule's placement. Between chunks that are neighbours on one stage none does.
"""

from __future__ import annotations

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.placement import chunks_of_stage, stage_of_chunk
from flopwright.spec.model import ModelSpec


def sums_held(model: ModelSpec, plan: ParallelPlan) -> tuple[int, ...]:
    """Returns by chunk how many finished sums its stage has before it runs; () where none is.

    They are all that were finished before the chunk behind the stage's last one.
    """
    if model.attn_res_block is None:
        return ()
    finished = _finished_before_chunks(model, plan)
    held = []
    for chunk in range(plan.num_chunks):
        before = [c for c in chunks_of_stage(plan, stage_of_chunk(plan, chunk)) if c < chunk]
        held.append(finished[before[-1] + 1] if before else 0)
    return tuple(held)


def states_into_chunks(model: ModelSpec, plan: ParallelPlan) -> tuple[int, ...]:
    """Returns by chunk how many hidden states come into it; () where one comes into each.

    The finished sums that its stage has not, and the running one.
    """
    if model.attn_res_block is None:
        return ()
    finished = _finished_before_chunks(model, plan)
    held = sums_held(model, plan)
    return tuple(all_ - own + 1 for all_, own in zip(finished, held, strict=True))


def _finished_before_chunks(model: ModelSpec, plan: ParallelPlan) -> tuple[int, ...]:
    chunks = plan.chunk_layers(model.num_layers)
    return tuple(model.residual_sources(layers.start)[0] - 1 for layers in chunks)
