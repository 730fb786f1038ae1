"""What a plan and its workload say, in words, for targets that have no field for it.

One text a facet, with every value in it; "" where the plan asks for nothing that would have to
be said. A target lists the facets that it does not express; tests hold every field of the plan
and of the workload to be expressed, listed or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import SELECTIVE_TAGS
from flopwright.spec.workload import Workload

Facet = Callable[[PlanFile], str]


def unsaid(plan: PlanFile, *facets: str) -> tuple[str, ...]:
    """Returns the texts of the facets that the plan asks for, in the order given."""
    return tuple(text for name in facets if (text := FACETS[name](plan)))


def _workload(plan: PlanFile) -> Workload:
    return plan.scenario.workload


def _optimizer(plan: PlanFile) -> str:
    o = _workload(plan).optimizer
    clip = "no clipping" if o.gradient_clip is None else f"clipped at {o.gradient_clip:g}"
    kind = f"muon (momentum {o.momentum:g}) beside adamw" if o.kind == "muon" else "adamw"
    return (
        f"the optimizer: {kind}, betas {o.beta1:g} and {o.beta2:g}, eps {o.eps:g}, weight decay "
        f"{o.weight_decay:g}, {clip}"
    )


def _momentum(plan: PlanFile) -> str:
    o = _workload(plan).optimizer
    return f"Muon's momentum {o.momentum:g}" if o.kind == "muon" else ""


def _per_head(plan: PlanFile) -> str:
    one = _workload(plan).optimizer.per_head
    return "Muon takes queries, keys and values a head at a time" if one else ""


def _eps(plan: PlanFile) -> str:
    return f"the optimizer's eps {_workload(plan).optimizer.eps:g}"


def _qk_clip(plan: PlanFile) -> str:
    tau = _workload(plan).optimizer.qk_clip_tau
    return "" if tau is None else f"QK-Clip: attention logits up to {tau:g}"


def _learning_rate(plan: PlanFile) -> str:
    rate = _workload(plan).learning_rate
    end = "" if rate.kind == "constant" else f" to {rate.final:g}"
    hold = "" if rate.hold_until_tokens is None else f", held to {rate.hold_until_tokens:,} tokens"
    return (
        f"the learning rate: {rate.kind}, peak {rate.peak:g}{end}, {rate.warmup_steps:,} steps "
        f"of warm-up{hold}"
    )


def _budget(plan: PlanFile) -> str:
    return f"the token budget: {_workload(plan).total_tokens:,} tokens"


def _seq_len(plan: PlanFile) -> str:
    return f"the context: {_workload(plan).seq_len:,} tokens"


def _seed(plan: PlanFile) -> str:
    return f"the seed: {_workload(plan).seed}" if _workload(plan).seed else ""


def _lora(plan: PlanFile) -> str:
    workload = _workload(plan)
    if workload.lora_rank is None:
        return ""
    frozen = workload.precision.frozen_weights or workload.precision.weights
    return (
        f"adapters of rank {workload.lora_rank} beside matrices ({workload.lora_targets}), the "
        f"other weights frozen in {frozen}"
    )


def _expert_load(plan: PlanFile) -> str:
    load = _workload(plan).expert_load
    texts = []
    if load.kind == "power_law":
        texts.append(f"expert loads as i^-{load.exponent:g}: an assumption of the prediction")
    if load.kind == "capacity":
        texts.append(
            f"experts that take {load.capacity_factor:g} times the mean and drop the rest"
        )
    if load.redundant_experts:
        texts.append(f"{load.redundant_experts} copies of the busiest experts")
    return ", ".join(texts)


def _redundant(plan: PlanFile) -> str:
    load = _workload(plan).expert_load
    return (
        f"{load.redundant_experts} copies of the busiest experts" if load.redundant_experts else ""
    )


def _power_law(plan: PlanFile) -> str:
    load = _workload(plan).expert_load
    return _expert_load(plan) if load.kind == "power_law" else _redundant(plan)


def _batch_ramp(plan: PlanFile) -> str:
    ramp = _workload(plan).batch_ramp
    if ramp is None:
        return ""
    return (
        f"the batch ramp: from {ramp.start:,} sequences by {ramp.increment:,} over the first "
        f"{ramp.tokens:,} tokens"
    )


def _packing(plan: PlanFile) -> str:
    packing = _workload(plan).packing
    if packing is None:
        return ""
    lengths = ", ".join(f"{d.share:g} of {d.tokens:,} tokens" for d in packing.lengths)
    priced = f" (priced for {lengths})" if lengths else ""
    return f"attention that stays within the documents of a row{priced}"


def _mixture(plan: PlanFile) -> str:
    mixture = _workload(plan).mixture
    return "" if mixture is None else f"the data's mixture: {mixture}"


def _rope_scaling(plan: PlanFile) -> str:
    scaling = _workload(plan).rope_scaling
    if scaling is None:
        return ""
    text = scaling if scaling == "none" else f"{scaling.kind}, factor {scaling.factor:g}"
    return f"this phase's scaling of positions ({text}): plan it by itself with --phase"


def _later_phases(plan: PlanFile) -> str:
    phases = _workload(plan).later_phases
    if not phases:
        return ""
    names = ", ".join(f"{p.name} ({p.total_tokens:,} tokens)" for p in phases)
    return f"the phases after the first: {names}: plan each with --phase and export it"


def _formats(plan: PlanFile) -> str:
    p = _workload(plan).precision
    return (
        f"formats: weights {p.weights}, gradients {p.gradients}, master weights "
        f"{p.master_weights}, optimizer state {p.optimizer_state}"
    )


def _gemm(plan: PlanFile) -> str:
    gemm = _workload(plan).precision.gemm
    return "" if gemm == "same" else f"{gemm} matrix products"


def _data_parallel(plan: PlanFile) -> str:
    library = plan.parallel.data_parallel
    return "" if library == "deepspeed" else f"data_parallel {library}: shards by its own means"


def _recompute(plan: PlanFile) -> str:
    parallel = plan.parallel
    if parallel.recompute == "selective":
        tags = ", ".join(sorted(parallel.recompute_tags or SELECTIVE_TAGS))
        return f"selective recompute of {tags}"
    return _recompute_layers(plan)


def _recompute_layers(plan: PlanFile) -> str:
    parallel = plan.parallel
    if parallel.recompute != "full" or parallel.recompute_layers is None:
        return ""
    return f"recompute of the first {parallel.recompute_layers} layers of each chunk alone"


def _context_parallel(plan: PlanFile) -> str:
    parallel = plan.parallel
    if parallel.cp == 1 or parallel.context_parallel == "ring":
        return ""
    return f"context parallelism by {parallel.context_parallel}"


def _sequence_parallel(plan: PlanFile) -> str:
    whole = plan.parallel.tp > 1 and not plan.parallel.sequence_parallel
    return "tensor parallelism without sequence parallelism" if whole else ""


def _etp(plan: PlanFile) -> str:
    etp = plan.parallel.etp
    return f"etp {etp}: ranks that cut each expert's matrices" if etp > 1 else ""


def _mtp(plan: PlanFile) -> str:
    layers = plan.scenario.model.mtp_layers
    return f"{layers} multi-token prediction layers" if layers else ""


def _on(name: str, text: str) -> Facet:
    return lambda plan: text if getattr(plan.parallel, name) else ""


FACETS: Final[dict[str, Facet]] = {
    "optimizer": _optimizer,
    "momentum": _momentum,
    "per_head": _per_head,
    "eps": _eps,
    "qk_clip": _qk_clip,
    "learning_rate": _learning_rate,
    "budget": _budget,
    "seq_len": _seq_len,
    "seed": _seed,
    "lora": _lora,
    "expert_load": _expert_load,
    "power_law": _power_law,
    "batch_ramp": _batch_ramp,
    "packing": _packing,
    "mixture": _mixture,
    "rope_scaling": _rope_scaling,
    "later_phases": _later_phases,
    "formats": _formats,
    "gemm": _gemm,
    "data_parallel": _data_parallel,
    "recompute": _recompute,
    "recompute_layers": _recompute_layers,
    "context_parallel": _context_parallel,
    "sequence_parallel": _sequence_parallel,
    "etp": _etp,
    "mtp": _mtp,
    "fp8_activations": _on("fp8_activations", "FP8 storage of saved activations"),
    "activation_offload": _on("activation_offload", "activation offload to host memory"),
    "optimizer_offload": _on("optimizer_offload", "optimizer state in host memory"),
    "gradient_offload": _on("gradient_offload", "gradient shards in host memory"),
    "parameter_offload": _on("parameter_offload", "weight shards in host memory"),
    "fused_loss": _on("fused_loss", "head and loss in one, without logits in memory"),
}
# What none of the frameworks' files has a field for.
NOWHERE: Final = (
    "rope_scaling",
    "later_phases",
    "packing",
    "mixture",
    "fused_loss",
    "per_head",
)
