"""What this executor runs of what a plan can say; the rest is refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from flopwright.errors import Violation
from flopwright.executor.launch.packing_rules import packing_rules
from flopwright.executor.launch.sharing_rules import sharing_rules
from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.model import GqaAttention, MlaAttention
from flopwright.spec.workload import Workload

_DTYPES: Final = ("fp32", "bf16", "fp64")
_Rule = tuple[str, bool, str, str]  # field, whether it is asked for, its value, what to do


def unsupported(plan: PlanFile) -> list[Violation]:
    """Returns what the plan asks for that this executor does not run."""
    return [
        Violation(field=field, value=value, rule="this executor does not run it", nearest_fix=fix)
        for field, asked_for, value, fix in _rules(plan)
        if asked_for
    ]


def refused_fields(plan: PlanFile) -> frozenset[str]:
    """Returns the fields of which this executor refuses some value, whatever the plan's are."""
    return frozenset(field for field, *_ in _rules(plan))


def _rules(plan: PlanFile) -> Iterable[_Rule]:
    rules = [*_plan_rules(plan.parallel), *_workload_rules(plan.scenario.workload)]
    tied = plan.scenario.model.tied_embeddings and plan.parallel.pp > 1
    rules.append(("parallel.pp", tied, f"{plan.parallel.pp}, with tied embeddings", "use 1"))
    rules += sharing_rules(plan)
    rules += packing_rules(plan)
    rules += _deepspeed_rules(plan)
    rules += _host_rules(plan)
    rules.append(_qk_clip_rule(plan))
    rules += _prediction_rules(plan)
    return rules


def _prediction_rules(plan: PlanFile) -> Iterable[_Rule]:
    """Yields where prediction modules are not run: they read embeddings, and later tokens."""
    p, seq_len, mtp = plan.parallel, plan.scenario.workload.seq_len, plan.scenario.model.mtp_layers
    apart = p.num_chunks > 1 or p.tp > 1 or p.cp > 1
    axes = f"pp {p.pp}, vpp {p.vpp}, tp {p.tp}, cp {p.cp}"
    fix = "use 0, or pp, vpp, tp and cp 1: a module reads the table and the tokens of later places"
    yield ("model.mtp_layers", mtp > 0 and apart, f"{mtp}, with {axes}", fix)
    short = f"{mtp}, of {seq_len} tokens a sequence"
    yield ("model.mtp_layers", mtp >= seq_len, short, "use less than a sequence has tokens")


def _plan_rules(plan: ParallelPlan) -> Iterable[_Rule]:
    parallel = plan.data_parallel
    return (
        (
            "parallel.data_parallel",
            parallel == "none" and plan.zero_stage > 0,
            parallel,
            "use deepspeed or fsdp2, or zero_stage 0",
        ),
    )


def _deepspeed_rules(plan: PlanFile) -> Iterable[_Rule]:
    """Yields what DeepSpeed's ZeRO optimizers cannot do."""
    p, model = plan.parallel, plan.scenario.model
    zero = p.zero_stage if p.data_parallel == "deepspeed" else 0
    wide = zero > 0 and plan.scenario.workload.precision.weights == "fp64"
    fix = "use fsdp2, or fp32: DeepSpeed keeps its part in fp32"
    yield ("parallel.zero_stage", wide, f"{zero}, in fp64", fix)
    fix = "use fsdp2, or 1: DeepSpeed cuts over all data-parallel ranks"
    replicas = zero > 0 and p.dp_replicate > 1
    yield ("parallel.dp_replicate", replicas, f"{p.dp_replicate}, with ZeRO of DeepSpeed", fix)
    apart = zero == 3 and model.moe is not None and p.ep * p.etp * p.tp > 1
    fix = "use fsdp2: DeepSpeed's stage 3 cuts every weight over the same ranks"
    yield ("parallel.zero_stage", apart, "3, with experts on ranks of their own", fix)
    chunks = zero == 3 and p.num_chunks > 1
    yield ("parallel.zero_stage", chunks, "3, with several chunks", "use fsdp2, or vpp 1")


def _host_rules(plan: PlanFile) -> Iterable[_Rule]:
    """Yields what cannot stand on the host, or cannot stay on the device, by itself."""
    p, precision = plan.parallel, plan.scenario.workload.precision
    cut = p.zero_stage > 0 and p.dp_shard * p.cp > 1
    narrow = precision.weights == "bf16"
    stays = p.data_parallel == "deepspeed" and p.zero_stage == 2 and narrow
    wanted = cut and p.optimizer_offload and not stays
    fix = f"use {str(wanted).lower()}: "
    fix += (
        "DeepSpeed sums bf16 gradients on the device"
        if stays
        else "sums of gradients stand where their optimizer runs"
    )
    apart = p.zero_stage >= 2 and p.gradient_offload != wanted
    yield ("parallel.gradient_offload", apart, str(p.gradient_offload).lower(), fix)
    wanted = cut and p.optimizer_offload
    alone = p.zero_stage == 3 and p.parameter_offload != wanted
    alone = alone and (p.data_parallel == "fsdp2" or p.parameter_offload)
    fix = f"use {str(wanted).lower()}: parts of weights stand with their optimizer"
    yield ("parallel.parameter_offload", alone, str(p.parameter_offload).lower(), fix)


def _qk_clip_rule(plan: PlanFile) -> _Rule:
    attention, tau = plan.scenario.model.attention, plan.scenario.workload.optimizer.qk_clip_tau
    normalised = isinstance(attention, GqaAttention) and attention.qk_norm
    sinks = isinstance(attention, GqaAttention) and attention.sinks
    index = isinstance(attention, MlaAttention) and attention.indexer is not None
    of = "attention sinks" if sinks else "an indexer"
    value = f"{tau}, with {'normalised queries and keys' if normalised else of}"
    fix = "leave it out: the norm bounds the logits already" if normalised else "leave it out"
    asked = tau is not None and (normalised or sinks or index)
    return ("workload.optimizer.qk_clip_tau", asked, value, fix)


def _workload_rules(workload: Workload) -> Iterable[_Rule]:
    precision = workload.precision
    formats = precision.weights == precision.compute and precision.weights in _DTYPES
    wide = precision.weights in {"fp32", "fp64"}
    sums = precision.weights if wide else "fp32"
    load, lora, gemm = workload.expert_load, workload.lora_rank, precision.gemm
    return (
        ("workload.lora_rank", lora is not None, str(lora), "leave it out"),
        ("workload.expert_load.kind", load.kind != "balanced", load.kind, "use balanced"),
        (
            "workload.expert_load.redundant_experts",
            load.redundant_experts > 0,
            str(load.redundant_experts),
            "use 0",
        ),
        ("workload.precision.gemm", gemm != "same", gemm, "use same"),
        *_phase_rules(workload),
        (
            "workload.precision.weights",
            not formats,
            f"{precision.weights}, computing in {precision.compute}",
            f"use equal formats out of {', '.join(_DTYPES)}",
        ),
        (
            "workload.precision.gradients",
            formats and precision.gradients != sums,
            precision.gradients,
            f"use {sums}",
        ),
        (
            "workload.precision.optimizer_state",
            formats and precision.optimizer_state != sums,
            precision.optimizer_state,
            f"use {sums}",
        ),
        (
            "workload.precision.master_weights",
            formats and precision.master_weights != ("none" if wide else "fp32"),
            precision.master_weights,
            "use none: wide weights are updated in place" if wide else "use fp32",
        ),
    )


def _phase_rules(workload: Workload) -> Iterable[_Rule]:
    scaling, count = workload.rope_scaling, len(workload.later_phases)
    alone = "run the plan of the whole run, or plan one phase (flopwright plan --phase)"
    return (
        ("workload.rope_scaling", scaling is not None, "beside the model's own", alone),
        ("workload.later_phases", count > 0, str(count), alone),
    )
