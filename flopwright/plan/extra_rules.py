"""Rules of a plan's finer choices: expert shards, context exchange, recompute lists, offloads.

They are part of plan/parallel.py's plan_violations, which reports all rules at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flopwright.errors import Violation, did_you_mean, nearest_divisors
from flopwright.spec.model import ModelSpec

if TYPE_CHECKING:
    from flopwright.plan.parallel import ParallelPlan


def shard_violations(plan: ParallelPlan, model: ModelSpec) -> list[Violation]:
    """Returns the broken rules of etp, sequence_parallel and context_parallel."""
    found = []
    if plan.etp > 1 and model.moe is None:
        found.append(
            Violation(
                field="parallel.etp",
                value=str(plan.etp),
                rule="the model has no experts",
                nearest_fix="use 1",
            )
        )
    elif model.moe is not None and model.moe.expert_intermediate_size % plan.etp:
        width = model.moe.expert_intermediate_size
        near = ", ".join(map(str, nearest_divisors(plan.etp, width)))
        found.append(
            Violation(
                field="parallel.etp",
                value=str(plan.etp),
                rule=f"must divide the experts' inner width ({width})",
                nearest_fix=f"nearest valid: {near}",
            )
        )
    if model.moe is not None and plan.tp > 1 and not plan.sequence_parallel:
        found.append(
            Violation(
                field="parallel.sequence_parallel",
                value="false",
                rule="tp ranks would each send all tokens to the experts",
                nearest_fix="use true, or tp 1",
            )
        )
    heads = model.attention.num_heads
    exchanged = plan.cp > 1 and plan.context_parallel == "ulysses"
    if exchanged and heads % plan.tp == 0 and heads // plan.tp % plan.cp:
        near = ", ".join(map(str, nearest_divisors(plan.cp, heads // plan.tp)))
        found.append(
            Violation(
                field="parallel.cp",
                value=str(plan.cp),
                rule=f"ulysses: must divide the heads of a tp rank ({heads // plan.tp})",
                nearest_fix=f"nearest valid: {near}; or use context_parallel ring",
            )
        )
    return found


def memory_move_violations(plan: ParallelPlan) -> list[Violation]:
    """Returns the broken rules of recompute lists and of what moves to the host."""
    from flopwright.plan.parallel import RECOMPUTE_TAGS  # it needs this module

    found = []
    for tag in plan.recompute_tags:
        if tag not in RECOMPUTE_TAGS:
            found.append(
                Violation(
                    field="parallel.recompute_tags",
                    value=tag,
                    rule=f"not one of {', '.join(RECOMPUTE_TAGS)}",
                    nearest_fix=did_you_mean(tag, RECOMPUTE_TAGS),
                )
            )
    rules = (
        ("recompute_tags", bool(plan.recompute_tags) and plan.recompute != "selective",
         ",".join(plan.recompute_tags), "only the recompute policy selective reads them",
         "use recompute selective, or leave recompute_tags out"),
        ("recompute_layers", plan.recompute_layers is not None and plan.recompute != "full",
         str(plan.recompute_layers), "only the recompute policy full reads it",
         "use recompute full, or leave recompute_layers out"),
        ("gradient_offload", plan.gradient_offload and plan.zero_stage < 2,
         "true", "shards of gradients exist from zero_stage 2 on", "use zero_stage 2, or false"),
        ("gradient_offload", plan.gradient_offload and not plan.optimizer_offload,
         "true", "the host holds the gradients for the optimizer that runs there",
         "use optimizer_offload too, or false"),
        ("parameter_offload", plan.parameter_offload and plan.zero_stage < 3,
         "true", "shards of weights exist from zero_stage 3 on", "use zero_stage 3, or false"),
    )  # fmt: skip
    for field, broken, value, rule, fix in rules:
        if broken:
            found.append(
                Violation(field=f"parallel.{field}", value=value, rule=rule, nearest_fix=fix)
            )
    return found
