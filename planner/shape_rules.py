"""The rules of a plan's shape over whole arrays: those of `plan.parallel.plan_violations`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.plan.parallel import MAX_MICROBATCHES, ParallelPlan
from flopwright.simulator.training import finer_rules as finer
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.schedule_rules import (
    chunks_fit,
    enough_microbatches,
    rounds_fit,
)
from flopwright.spec.scenario import Scenario

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        name: its name in messages and counts; `field` is the plan's field it speaks of.
        reason: what must hold and why.
        holds: candidates, scenario -> True where the rule holds.
        fix: the smallest change for one plan that breaks it.
        shape: whether plan_violations also checks it (it then words the message).
        memory: whether it reads a memory policy (space_axes.Policy); without one it holds.
    """

    name: str
    field: str
    reason: str
    holds: Callable[[Candidates, Scenario], Bools]
    fix: Callable[[ParallelPlan, Scenario], str] = lambda plan, scenario: ""
    shape: bool = False
    memory: bool = False


def _lending(c: Candidates) -> NDArray[np.int64]:
    return c.dp_shard * c.cp * c.tp


def _experts(c: Candidates, scenario: Scenario) -> Bools:
    moe = scenario.model.moe
    return np.asarray(moe.num_experts % c.ep == 0 if moe is not None else c.ep == 1)


def _layouts(c: Candidates, scenario: Scenario) -> Bools:
    chunks = np.array([0, *(len(layout) for layout in c.layouts)])
    layers = np.array([0, *(sum(layout) for layout in c.layouts)])
    found = c.layout + 1
    given = (chunks[found] == c.pp * c.vpp) & (layers[found] == scenario.model.num_layers)
    return np.asarray((c.layout < 0) | given)


def _batch(c: Candidates, scenario: Scenario) -> Bools:
    # What divides every batch of a ramp divides what they have in common.
    common = math.gcd(*scenario.workload.batches)
    return np.asarray(common % (c.micro_batch_size * c.dp) == 0)


def _rounds(c: Candidates, scenario: Scenario) -> Bools:
    microbatches = c.num_microbatches(math.gcd(*scenario.workload.batches))
    # A batch that does not divide is the other rule's to report.
    return rounds_fit(c, microbatches) | ~_batch(c, scenario)


def _enough(c: Candidates, scenario: Scenario) -> Bools:
    microbatches = c.num_microbatches(min(scenario.workload.batches))
    found = enough_microbatches(c, microbatches) | ~_rounds(c, scenario)
    return found | ~_batch(c, scenario)


def _context(c: Candidates, scenario: Scenario) -> Bools:
    return np.full(len(c), scenario.workload.seq_len <= scenario.model.max_seq_len)


SHAPE_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        name="ranks",
        field="parallel.world_size",
        reason="dp_replicate*dp_shard*tp*cp*pp must not exceed the cluster's GPUs",
        holds=lambda c, s: np.asarray(c.world_size <= s.cluster.num_gpus),
        shape=True,
    ),
    Rule(
        name="expert_ranks",
        field="parallel.ep",
        reason="ep must divide dp_shard*cp*tp: experts borrow these ranks",
        holds=lambda c, s: np.asarray(_lending(c) % c.ep == 0),
        shape=True,
    ),
    Rule(
        name="heads",
        field="parallel.tp",
        reason="tp must divide the attention heads",
        holds=lambda c, s: np.asarray(s.model.common_heads % c.tp == 0),
        shape=True,
    ),
    Rule(
        name="experts",
        field="parallel.ep",
        reason="ep must divide the routed experts",
        holds=_experts,
        shape=True,
    ),
    Rule(
        name="chunks",
        field="parallel.pp",
        reason="pp*vpp must not exceed the layers",
        holds=lambda c, s: np.asarray(c.pp * c.vpp <= s.model.num_layers),
        shape=True,
    ),
    Rule(
        name="layer_split",
        field="parallel.layers_per_stage",
        reason="needs one entry a chunk, summing to the layers",
        holds=_layouts,
        shape=True,
    ),
    Rule(
        name="zero_in_pipeline",
        field="parallel.zero_stage",
        reason="gradients cannot be sharded across micro-batches of a pipeline",
        holds=lambda c, s: np.asarray((c.zero_stage <= 1) | (c.pp == 1)),
        shape=True,
    ),
    Rule(
        name="schedule",
        field="parallel.schedule",
        reason="vpp and the schedule must go together",
        holds=lambda c, s: chunks_fit(c),
        shape=True,
    ),
    Rule(
        name="batch",
        field="parallel.micro_batch_size",
        reason="micro_batch_size*dp must divide global_batch_size, and every batch of a ramp",
        holds=_batch,
        shape=True,
    ),
    Rule(
        name="microbatches",
        field="parallel.num_microbatches",
        reason=f"a rank runs at most {MAX_MICROBATCHES} micro-batches a step",
        holds=lambda c, s: np.asarray(
            c.num_microbatches(max(s.workload.batches)) <= MAX_MICROBATCHES
        ),
        shape=True,
    ),
    Rule(
        name="interleaved_batch",
        field="parallel.pp",
        reason="interleaving needs num_microbatches to be a multiple of pp",
        holds=_rounds,
        shape=True,
    ),
    Rule(
        name="schedule_batch",
        field="parallel.schedule",
        reason="dualpipe_v needs at least 2*pp micro-batches",
        holds=_enough,
        shape=True,
    ),
    Rule(
        name="context",
        field="workload.seq_len",
        reason="must not exceed the model's max_seq_len",
        holds=_context,
        shape=True,
    ),
    Rule(
        name="expert_shards",
        field="parallel.etp",
        reason="ep*etp must divide dp_shard*cp*tp, and etp the experts' inner width",
        holds=lambda c, s: finer.expert_shards_fit(c, s.model),
        shape=True,
    ),
    Rule(
        name="tokens_sent_once",
        field="parallel.sequence_parallel",
        reason="without sequence parallelism tp ranks would each send all tokens to the experts",
        holds=lambda c, s: finer.tokens_are_sent_once(c, s.model),
        shape=True,
    ),
    Rule(
        name="ulysses_heads",
        field="parallel.cp",
        reason="ulysses: cp must divide the heads of a tp rank",
        holds=lambda c, s: finer.heads_can_be_exchanged(c, s.model),
        shape=True,
    ),
    Rule(
        name="recompute_lists",
        field="parallel.recompute_tags",
        reason="known groups, with the recompute policy selective",
        holds=lambda c, s: finer.recompute_lists_are_read(c),
        shape=True,
        memory=True,
    ),
    Rule(
        name="recompute_depth",
        field="parallel.recompute_layers",
        reason="only the recompute policy full reads it",
        holds=lambda c, s: finer.recompute_depth_is_read(c),
        shape=True,
        memory=True,
    ),
    Rule(
        name="gradient_shards_move",
        field="parallel.gradient_offload",
        reason="needs zero_stage 2 or 3 and optimizer_offload",
        holds=lambda c, s: finer.gradients_can_move(c),
        shape=True,
        memory=True,
    ),
    Rule(
        name="weight_shards_move",
        field="parallel.parameter_offload",
        reason="needs zero_stage 3",
        holds=lambda c, s: finer.weights_can_move(c),
        shape=True,
        memory=True,
    ),
)
