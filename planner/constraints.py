"""Which candidates are legal: named rules over whole arrays of plans, each with its reason.

The rules of shape are those of `plan.parallel.plan_violations`, over arrays; the rest are
the planner's own: plans that cannot run on this hardware, or that only repeat another.
Memory is not a rule of shape: it is judged after pricing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.errors import Violation, nearest_divisors
from flopwright.plan.parallel import MAX_MICROBATCHES, ParallelPlan, plan_violations
from flopwright.simulator.training import finer_rules as finer
from flopwright.simulator.training.candidates import RECOMPUTES, Candidates
from flopwright.simulator.training.schedule_rules import (
    chunks_fit,
    enough_microbatches,
    rounds_fit,
)
from flopwright.spec.scenario import Scenario

Bools = NDArray[np.bool_]
# Ranks that the arrays' 64 bits cannot hold; "ranks" has refused them.
_WRAPS: Final = 2**62
_FULL: Final = RECOMPUTES.index("full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        name: its name in messages and counts; `field` is the plan's field it speaks of.
        reason: what must hold and why.
        holds: candidates, scenario -> True where the rule holds.
        fix: the smallest change for one plan that breaks it.
        shape: whether plan_violations also checks it (it then words the message).
    """

    name: str
    field: str
    reason: str
    holds: Callable[[Candidates, Scenario], Bools]
    fix: Callable[[ParallelPlan, Scenario], str] = lambda plan, scenario: ""
    shape: bool = False


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
    return np.asarray(scenario.workload.global_batch_size % (c.micro_batch_size * c.dp) == 0)


def _rounds(c: Candidates, scenario: Scenario) -> Bools:
    microbatches = c.num_microbatches(scenario.workload.global_batch_size)
    # A batch that does not divide is the other rule's to report.
    return rounds_fit(c, microbatches) | ~_batch(c, scenario)


def _enough(c: Candidates, scenario: Scenario) -> Bools:
    microbatches = c.num_microbatches(scenario.workload.global_batch_size)
    found = enough_microbatches(c, microbatches) | ~_rounds(c, scenario)
    return found | ~_batch(c, scenario)


def _context(c: Candidates, scenario: Scenario) -> Bools:
    return np.full(len(c), scenario.workload.seq_len <= scenario.model.max_seq_len)


def _has_fp8(scenario: Scenario) -> bool:
    gpu = scenario.cluster.node.gpu
    return gpu.kind != "cpu" and "fp8" in gpu.peak_flops_per_s


def _has_host_link(scenario: Scenario) -> bool:
    return scenario.cluster.node.host_link is not None


def _all_gpus(c: Candidates, scenario: Scenario) -> Bools:
    if scenario.objective == "cost":
        return np.asarray(c.world_size <= scenario.cluster.num_gpus)
    return np.asarray(c.world_size == scenario.cluster.num_gpus)


def _fast_links(tp: NDArray[np.int64], scenario: Scenario) -> Bools:
    node = scenario.cluster.node
    whole_nodes = (tp % node.gpus == 0) & (tp <= node.domain_gpus)
    return np.asarray((node.gpus % tp == 0) | whole_nodes)


def _near(value: int, of: int) -> str:
    return f"nearest valid: {', '.join(map(str, nearest_divisors(value, of)))}"


def _use_all(plan: ParallelPlan, gpus: int) -> str:
    model_ranks = plan.tp * plan.cp * plan.pp
    if gpus % model_ranks == 0:
        return f"use dp {gpus // model_ranks}"
    return f"tp*cp*pp ({model_ranks}) must divide {gpus}; {_near(model_ranks, gpus)}"


RULES: Final[tuple[Rule, ...]] = (
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
        holds=lambda c, s: np.asarray(s.model.attention.num_heads % c.tp == 0),
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
        reason="micro_batch_size*dp must divide global_batch_size",
        holds=_batch,
        shape=True,
    ),
    Rule(
        name="microbatches",
        field="parallel.num_microbatches",
        reason=f"a rank runs at most {MAX_MICROBATCHES} micro-batches a step",
        holds=lambda c, s: np.asarray(
            c.num_microbatches(s.workload.global_batch_size) <= MAX_MICROBATCHES
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
    ),
    Rule(
        name="recompute_depth",
        field="parallel.recompute_layers",
        reason="only the recompute policy full reads it",
        holds=lambda c, s: finer.recompute_depth_is_read(c),
        shape=True,
    ),
    Rule(
        name="gradient_shards_move",
        field="parallel.gradient_offload",
        reason="needs zero_stage 2 or 3 and optimizer_offload",
        holds=lambda c, s: finer.gradients_can_move(c),
        shape=True,
    ),
    Rule(
        name="weight_shards_move",
        field="parallel.parameter_offload",
        reason="needs zero_stage 3",
        holds=lambda c, s: finer.weights_can_move(c),
        shape=True,
    ),
    Rule(
        name="all_gpus",
        field="parallel.world_size",
        reason="dp*tp*cp*pp must use every GPU of the cluster (objective time)",
        holds=_all_gpus,
        fix=lambda p, s: _use_all(p, s.cluster.num_gpus),
    ),
    Rule(
        name="tp_in_node",
        field="parallel.tp",
        reason="tp must divide a node, or fill nodes of one NVLink domain: its collectives run in "
        "every layer",
        holds=lambda c, s: _fast_links(c.tp, s),
        fix=lambda p, s: _near(p.tp, s.cluster.node.gpus),
    ),
    Rule(
        name="sequence_shards",
        field="parallel.tp",
        reason="cp*tp must divide seq_len: sequence parallelism cuts the tokens",
        holds=lambda c, s: np.asarray(
            s.workload.seq_len % (c.cp * np.where(c.sequence_parallel > 0, c.tp, 1)) == 0
        ),
        fix=lambda p, s: _near(p.tp, s.workload.seq_len // p.cp),
    ),
    Rule(
        name="zero_needs_ranks",
        field="parallel.zero_stage",
        reason="sharding over one rank is zero_stage 0",
        holds=lambda c, s: np.asarray((c.zero_stage == 0) | (c.dp_shard * c.cp > 1)),
        fix=lambda p, s: "use zero_stage 0",
    ),
    Rule(
        name="replicas_need_sharding",
        field="parallel.dp_replicate",
        reason="replicas of a shard group only differ from plain data parallelism under ZeRO",
        holds=lambda c, s: np.asarray((c.zero_stage > 0) | (c.dp_replicate == 1)),
        fix=lambda p, s: "use dp_replicate 1",
    ),
    Rule(
        name="virtual_stages_need_a_pipeline",
        field="parallel.vpp",
        reason="virtual stages shorten a pipeline's bubble; without a pipeline there is none",
        holds=lambda c, s: np.asarray((c.vpp == 1) | (c.pp > 1)),
        fix=lambda p, s: "use vpp 1",
    ),
    Rule(
        name="fp8_format",
        field="parallel.fp8_activations",
        reason="the GPU has no FP8 format to store activations in",
        holds=lambda c, s: np.asarray((c.fp8_activations == 0) | _has_fp8(s)),
        fix=lambda p, s: "turn fp8_activations off",
    ),
    Rule(
        name="fp8_stores_something",
        field="parallel.fp8_activations",
        reason="full recompute keeps no tensor that FP8 storage applies to",
        holds=lambda c, s: np.asarray((c.fp8_activations == 0) | (c.recompute != _FULL)),
        fix=lambda p, s: "turn fp8_activations off",
    ),
    Rule(
        name="host_link",
        field="parallel.activation_offload",
        reason="offloading needs the cluster's node.host_link",
        holds=lambda c, s: np.asarray(
            (c.activation_offload + c.optimizer_offload + c.parameter_offload == 0)
            | _has_host_link(s)
        ),
        fix=lambda p, s: "give node.host_link, or turn the offloads off",
    ),
)


def legal(candidates: Candidates, scenario: Scenario) -> Bools:
    """Returns True where a candidate breaks no rule."""
    out = np.ones(len(candidates), bool)
    for rule in RULES:
        out &= rule.holds(candidates, scenario)
    return out


def broken_rules(candidates: Candidates, scenario: Scenario) -> dict[str, Bools]:
    """Returns, by rule name, True where a candidate breaks the rule."""
    return {rule.name: ~rule.holds(candidates, scenario) for rule in RULES}


def violations(plan: ParallelPlan, scenario: Scenario) -> tuple[Violation, ...]:
    """Returns every rule that one plan breaks, with its reason and nearest fix."""
    found = list(plan_violations(plan, scenario))
    too_many = plan.world_size > scenario.cluster.num_gpus
    if plan.world_size >= _WRAPS:
        return tuple(found)
    one = Candidates.from_plans((plan,))
    for rule in RULES:
        if rule.shape or bool(rule.holds(one, scenario)[0]):
            continue
        if rule.name == "all_gpus" and too_many:
            continue  # "ranks" says it already
        value = getattr(plan, rule.field.removeprefix("parallel."))
        found.append(
            Violation(
                field=rule.field,
                value=str(value),
                rule=rule.reason,
                nearest_fix=rule.fix(plan, scenario),
            )
        )
    return tuple(found)
