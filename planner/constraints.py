"""Which candidates are legal: named rules over whole arrays of plans, each with its reason.

The rules of shape are those of `plan.parallel.plan_violations`, over arrays; the rest are
the planner's own: plans that cannot run on this hardware, or that only repeat another.
Memory is not a rule of shape: it is judged after pricing.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.errors import Violation, nearest_divisors
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.planner.shape_rules import SHAPE_RULES, Bools, Rule
from flopwright.simulator.training.candidates import RECOMPUTES, Candidates
from flopwright.spec.scenario import Scenario

# Ranks that the arrays' 64 bits cannot hold; "ranks" has refused them.
_WRAPS: Final = 2**62
_FULL: Final = RECOMPUTES.index("full")


def _has_fp8(scenario: Scenario) -> bool:
    gpu = scenario.cluster.node.gpu
    return gpu.kind != "cpu" and "fp8" in gpu.peak_flops_per_s


def _has_host_link(scenario: Scenario) -> bool:
    return scenario.cluster.node.host_link is not None


def _all_gpus(c: Candidates, scenario: Scenario) -> Bools:
    if scenario.objective in ("time", "headroom"):
        return np.asarray(c.world_size == scenario.cluster.num_gpus)
    return np.asarray(c.world_size <= scenario.cluster.num_gpus)


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
    *SHAPE_RULES,
    Rule(
        name="all_gpus",
        field="parallel.world_size",
        reason="dp*tp*cp*pp must use every GPU of the cluster (objective time or headroom)",
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
        memory=True,
        fix=lambda p, s: "turn fp8_activations off",
    ),
    Rule(
        name="fp8_stores_something",
        field="parallel.fp8_activations",
        reason="full recompute keeps no tensor that FP8 storage applies to",
        holds=lambda c, s: np.asarray(
            (c.fp8_activations == 0) | (c.recompute != _FULL) | (c.recompute_layers >= 0)
        ),
        memory=True,
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
        memory=True,
        fix=lambda p, s: "give node.host_link, or turn the offloads off",
    ),
)


MEMORY_RULES: Final = tuple(rule for rule in RULES if rule.memory)


def legal(candidates: Candidates, scenario: Scenario, rules: tuple[Rule, ...] = RULES) -> Bools:
    """Returns True where a candidate breaks none of the rules."""
    out = np.ones(len(candidates), bool)
    for rule in rules:
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
