"""Whether candidates can be priced at all: every rule that is broken, with its first example."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.errors import InputError, Violation
from flopwright.plan.parallel import MAX_MICROBATCHES
from flopwright.simulator.training import finer_rules as rules_of
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.schedule_rules import (
    chunks_fit,
    enough_microbatches,
    rounds_fit,
)
from flopwright.spec.scenario import Scenario

# With more, products of the axes might wrap around in 64 bits.
_MAX_RANKS: Final = 2**31


def check_candidates(scenario: Scenario, candidates: Candidates) -> None:
    """Raises InputError where a candidate breaks a rule without which it has no meaning.

    The search filters by the same rules before (plan/parallel.py); this keeps nonsense from
    becoming a number.
    """
    c, model, batch = candidates, scenario.model, scenario.workload.global_batch_size
    experts = model.moe.num_experts if model.moe else 1
    # Fields may each be large: their product is taken where it cannot wrap around.
    axes = (c.dp_replicate, c.dp_shard, c.tp, c.cp, c.pp)
    world = np.prod([a.astype(float) for a in axes], axis=0)
    too_many = f"must not exceed the cluster's GPUs ({scenario.cluster.num_gpus})"
    if np.any(world > _MAX_RANKS):
        raise InputError(_broken(c, "world_size", world > _MAX_RANKS, too_many))
    with np.errstate(divide="ignore"):
        m = c.num_microbatches(batch)
    rules = (
        ("micro_batch_size", batch % (c.micro_batch_size * c.dp) != 0,
         f"micro_batch_size*dp must divide global_batch_size ({batch})"),
        ("tp", model.common_heads % c.tp != 0,
         f"must divide the attention heads ({model.common_heads})"),
        ("ep", experts % c.ep != 0, f"must divide the routed experts ({experts})"),
        ("ep", (c.dp_shard * c.cp * c.tp) % c.ep != 0, "must divide dp_shard*cp*tp"),
        ("pp", c.pp * c.vpp > model.num_layers,
         f"pp*vpp must not exceed the model's layers ({model.num_layers})"),
        ("schedule", ~chunks_fit(c), "vpp and the schedule must go together"),
        ("pp", ~rounds_fit(c, m), "interleaving needs num_microbatches to be a multiple of pp"),
        ("schedule", ~enough_microbatches(c, m), "dualpipe_v needs at least 2*pp micro-batches"),
        ("zero_stage", (c.zero_stage > 1) & (c.pp > 1),
         "gradients cannot be sharded across micro-batches of a pipeline"),
        ("world_size", world > scenario.cluster.num_gpus, too_many),
        ("num_microbatches", m > MAX_MICROBATCHES,
         f"a rank runs at most {MAX_MICROBATCHES} micro-batches a step"),
        ("etp", ~rules_of.expert_shards_fit(c, model),
         "ep*etp must divide dp_shard*cp*tp, and etp the experts' inner width"),
        ("sequence_parallel", ~rules_of.tokens_are_sent_once(c, model),
         "tp ranks would each send all tokens to the experts"),
        ("cp", ~rules_of.heads_can_be_exchanged(c, model),
         "ulysses: must divide the heads of a tp rank"),
        ("recompute_tags", ~rules_of.recompute_lists_are_read(c),
         "known groups, with the recompute policy selective"),
        ("recompute_layers", ~rules_of.recompute_depth_is_read(c),
         "only the recompute policy full reads it"),
        ("gradient_offload", ~rules_of.gradients_can_move(c),
         "needs zero_stage 2 or 3 and optimizer_offload"),
        ("parameter_offload", ~rules_of.weights_can_move(c), "needs zero_stage 3"),
        ("layers_per_stage", _bad_layouts(c, model.num_layers),
         f"needs pp*vpp entries that sum to num_layers ({model.num_layers})"),
    )  # fmt: skip
    broken = [_broken(c, field, bad, rule) for field, bad, rule in rules if np.any(bad)]
    if broken:
        raise InputError(broken)


def _broken(c: Candidates, field: str, bad: NDArray[np.bool_], rule: str) -> Violation:
    return Violation(field=field, value=c.plan(int(np.argmax(bad))).label(), rule=rule)


def _bad_layouts(c: Candidates, num_layers: int) -> NDArray[np.bool_]:
    bad = np.zeros(len(c), bool)
    for i, layout in enumerate(c.layouts):
        wrong_sum = sum(layout) != num_layers
        bad |= (c.layout == i) & ((c.pp * c.vpp != len(layout)) | wrong_sum)
    return bad
