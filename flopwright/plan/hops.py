"""How many hidden states travel between the chunks of a pipeline."""

from __future__ import annotations

from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.model import ModelSpec


def states_into_chunks(model: ModelSpec, plan: ParallelPlan) -> tuple[int, ...]:
    """Returns by chunk how many hidden states come into it; () where one comes into each.

    With attention residuals the sums of all finished blocks travel beside the running one.
    """
    if model.attn_res_block is None:
        return ()
    chunks = plan.chunk_layers(model.num_layers)
    return tuple(model.residual_sources(layers[0])[0] for layers in chunks)
