"""The rules of plan/extra_rules.py on many candidates at once: True where a rule holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flopwright.plan.parallel import RECOMPUTE_TAGS
from flopwright.simulator.training.candidates import CONTEXTS, RECOMPUTES, Candidates
from flopwright.spec.model import ModelSpec

Bools = NDArray[np.bool_]


def expert_shards_fit(c: Candidates, model: ModelSpec) -> Bools:
    """Returns whether etp ranks can cut an expert, and are there beside ep."""
    if model.moe is None:
        return np.asarray(c.etp == 1)
    lending = c.dp_shard * c.cp * c.tp
    # An ep that does not divide is the other rule's to report.
    ranks = (lending % (c.ep * c.etp) == 0) | (lending % c.ep != 0)
    return np.asarray(ranks & (model.moe.expert_intermediate_size % c.etp == 0))


def tokens_are_sent_once(c: Candidates, model: ModelSpec) -> Bools:
    """Returns whether tp ranks do not all send the same tokens to the experts."""
    once = (c.sequence_parallel > 0) | (c.tp == 1)
    return np.asarray(once | (model.moe is None))


def heads_can_be_exchanged(c: Candidates, model: ModelSpec) -> Bools:
    """Returns whether ulysses finds enough heads on a tp rank."""
    exchanged = (c.cp > 1) & (c.context_parallel == CONTEXTS.index("ulysses"))
    heads = model.attention.num_heads
    return np.asarray(~exchanged | (heads % c.tp != 0) | (heads // c.tp % c.cp == 0))


def recompute_lists_are_read(c: Candidates) -> Bools:
    """Returns whether a plan's recompute_tags are known and its policy reads them."""
    known = np.array([True, *(set(tags) <= set(RECOMPUTE_TAGS) for tags in c.tag_lists)])
    selective = c.recompute == RECOMPUTES.index("selective")
    return np.asarray(known[c.recompute_tags + 1] & ((c.recompute_tags < 0) | selective))


def recompute_depth_is_read(c: Candidates) -> Bools:
    """Returns whether a plan's recompute_layers go with the policy that reads them."""
    return np.asarray((c.recompute_layers < 0) | (c.recompute == RECOMPUTES.index("full")))


def gradients_can_move(c: Candidates) -> Bools:
    """Returns whether there are gradient shards to keep on the host, for an optimizer there."""
    ready = (c.zero_stage >= 2) & (c.optimizer_offload > 0)
    return np.asarray((c.gradient_offload == 0) | ready)


def weights_can_move(c: Candidates) -> Bools:
    """Returns whether there are weight shards to keep on the host."""
    return np.asarray((c.parameter_offload == 0) | (c.zero_stage == 3))
