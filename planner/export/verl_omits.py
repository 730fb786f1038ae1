"""What of a plan verl's overrides do not say."""

from __future__ import annotations

from typing import Final

from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.export.megatron import MODULES
from flopwright.planner.export.text import that_apply
from flopwright.planner.export.unsaid import NOWHERE, unsaid

Claims = list[tuple[bool, str]]


def uses_fsdp(parallel: ParallelPlan) -> bool:
    """Returns whether verl's FSDP engine trains the plan, not its Megatron engine."""
    model_ranks = parallel.tp * parallel.pp * parallel.ep * parallel.etp
    return parallel.zero_stage > 1 and model_ranks == 1


def not_expressed(plan: PlanFile) -> tuple[str, ...]:
    """Returns what the overrides leave to verl or to the user, each in words."""
    fsdp = uses_fsdp(plan.parallel)
    claims = _fsdp_claims(plan) if fsdp else _megatron_claims(plan)
    facets = _FSDP_HAS_NOT if fsdp else _MEGATRON_HAS_NOT
    return _left_to_verl(plan) + that_apply(claims) + unsaid(plan, *facets)


def _left_to_verl(plan: PlanFile) -> tuple[str, ...]:
    return (
        f"the model: actor_rollout_ref.model.path names a Hugging Face folder of "
        f"{plan.scenario.model.name}",
        f"how a sequence of {plan.scenario.workload.seq_len:,} tokens divides: a quarter is "
        "prompt here, the rest response",
        "the rollouts: vllm, a replica a node, one response a prompt; rewards and algorithm "
        "(GRPO) are verl's defaults. The prediction is of the actor's training step alone",
    )


def _megatron_claims(plan: PlanFile) -> Claims:
    parallel, workload = plan.parallel, plan.scenario.workload
    precision = workload.precision
    tags = set(parallel.recompute_tags or ("norm", "swiglu", "mla_up"))
    return [
        (
            parallel.dp_replicate > 1,
            f"dp_replicate {parallel.dp_replicate}: the optimizer is sharded over all "
            "data-parallel ranks",
        ),
        (
            parallel.recompute == "selective" and not tags <= set(MODULES),
            f"recompute of {', '.join(sorted(tags - set(MODULES)))}",
        ),
        (
            precision.weights != precision.compute or precision.master_weights != "fp32",
            f"weights in {precision.weights} with master weights {precision.master_weights}: "
            f"they are kept in {precision.compute}, with an fp32 copy",
        ),
    ]


def _fsdp_claims(plan: PlanFile) -> Claims:
    parallel, workload = plan.parallel, plan.scenario.workload
    rate, precision = workload.learning_rate, workload.precision
    held = rate.hold_until_tokens or 0
    moved = [n for n in _MOVES if getattr(parallel, n)]
    return [
        (workload.optimizer.kind == "muon", "Muon: the FSDP engine trains with AdamW"),
        (
            rate.kind in {"linear", "wsd"},
            f"a {rate.kind} decay (held to {held:,} tokens): the FSDP engine has constant and "
            "cosine",
        ),
        (
            parallel.recompute == "selective",
            "the FSDP engine computes whole layers again or none",
        ),
        (
            0 < len(moved) < len(_MOVES),
            f"{', '.join(moved)} alone: offload_policy moves weights, gradients and optimizer "
            "state together",
        ),
        (
            precision.gradients != "fp32" or precision.optimizer_state != "fp32",
            f"gradients in {precision.gradients}, optimizer state in "
            f"{precision.optimizer_state}: as the sharded weights",
        ),
        (
            precision.weights != precision.compute or precision.master_weights != "fp32",
            f"weights in {precision.weights}, master weights {precision.master_weights}: one "
            "sharded copy in model_dtype",
        ),
        (workload.expert_load.kind == "capacity", "experts' capacity: no token is dropped"),
    ]


_MOVES: Final = ("optimizer_offload", "gradient_offload", "parameter_offload")
_BOTH: Final = ("qk_clip", "batch_ramp", "data_parallel", "fp8_activations", "mtp", *NOWHERE)
_MEGATRON_HAS_NOT: Final = (
    "power_law",
    "activation_offload",
    "gradient_offload",
    "parameter_offload",
    *_BOTH,
)
_FSDP_HAS_NOT: Final = ("momentum", "eps", "expert_load", "gemm", "recompute", *_BOTH)
