"""Megatron-LM's command-line arguments of a plan.

Flag names and their meaning: Megatron-LM's `megatron/training/arguments.py` and Megatron
Core's `TransformerConfig` (0.16). The file is an argument list for a shell: `source` it and
pass "${MEGATRON_ARGS[@]}" to `pretrain_gpt.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Final

from flopwright.errors import InputError, Violation
from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import even_split
from flopwright.planner.export.megatron_model import Flag, model_flags
from flopwright.planner.export.target import header
from flopwright.planner.export.text import TargetFile, omission_lines, that_apply
from flopwright.planner.export.unsaid import NOWHERE, unsaid
from flopwright.spec.model import GqaAttention, MlaAttention, ModelSpec, YarnScaling
from flopwright.spec.workload import Workload

FILE: Final = "megatron_args.sh"

# Our schedules that Megatron's own pipeline runs.
MEGATRON_SCHEDULES: Final = frozenset({"1f1b", "interleaved_1f1b"})
# Our recompute tags in Megatron's words (--recompute-modules).
MODULES: Final = {
    "norm": "layernorm",
    "mla_up": "mla_up_proj",
    "swiglu": "moe_act",
    "moe_act": "moe_act",
    "core_attn": "core_attn",
    "mlp": "mlp",
}


def megatron_file(plan: PlanFile) -> TargetFile:
    """Returns the arguments as a shell array, one flag a line.

    Raises:
        InputError: what Megatron-LM has no arguments for and cannot run without.
    """
    omitted = not_expressed(plan)
    lines = "\n".join(f"  {shlex.join(flag)}" for flag in megatron_flags(plan))
    text = (
        header(plan, "megatron")
        + "# source this file, then: torchrun ... pretrain_gpt.py"
        + ' "${MEGATRON_ARGS[@]}" --data-path ... --tokenizer-type ...\n'
        + omission_lines(omitted)
        + f"MEGATRON_ARGS=(\n{lines}\n)\n"
    )
    return TargetFile(name=FILE, text=text, omitted=omitted)


def megatron_flags(plan: PlanFile) -> tuple[Flag, ...]:
    """Returns the flags, each with its values.

    Raises:
        InputError: every part of the plan that Megatron-LM cannot run.
    """
    _check(plan)
    model, workload = plan.scenario.model, plan.scenario.workload
    return (
        *model_flags(model),
        *_parallel_flags(plan),
        *_load_flags(plan),
        *_memory_flags(plan),
        *_workload_flags(workload),
    )


def _check(plan: PlanFile) -> None:
    parallel, model = plan.parallel, plan.scenario.model
    found = []
    if parallel.pp > 1 and parallel.schedule not in MEGATRON_SCHEDULES:
        found.append(
            Violation(
                field="parallel.schedule",
                value=parallel.schedule,
                rule="Megatron-LM's pipeline has no such schedule",
                nearest_fix="use 1f1b, or interleaved_1f1b with vpp above 1",
            )
        )
    found += list(_unknown_blocks(model))
    rope = model.attention.rope if isinstance(model.attention, MlaAttention) else None
    scaling = None if rope is None else rope.scaling
    if scaling is not None and not isinstance(scaling, YarnScaling):
        found.append(
            Violation(
                field="model.attention.rope.scaling",
                rule="Megatron-LM scales the rotary embedding of MLA by YaRN only",
                nearest_fix="use kind yarn, or none",
            )
        )
    if parallel.zero_stage in {2, 3} and parallel.pp > 1:
        found.append(
            Violation(
                field="parallel.zero_stage",
                value=str(parallel.zero_stage),
                rule="Megatron-FSDP shards gradients and weights without a pipeline only",
                nearest_fix="use zero_stage 1",
            )
        )
    if found:
        raise InputError(found)


def _unknown_blocks(model: ModelSpec) -> Iterator[Violation]:
    """Yields the parts of a model that Megatron-LM has no arguments for."""
    attention, moe = model.attention, model.moe
    latent = isinstance(attention, MlaAttention)
    parts = (
        ("linear_attention", model.linear_attention is not None),
        ("attn_res_block", model.attn_res_block is not None),
        ("attention.rope", latent and attention.rope is None),
        ("attention.output_gate", isinstance(attention, MlaAttention) and attention.output_gate),
        (
            "attention.indexer",
            isinstance(attention, MlaAttention) and attention.indexer is not None,
        ),
        ("mlp.kind", model.mlp.kind in {"situ_glu", "relu2", "clamped_glu"}),
        (
            "attention.qk_norm_whole",
            isinstance(attention, GqaAttention) and attention.qk_norm_whole,
        ),
        ("attention.sinks", isinstance(attention, GqaAttention) and attention.sinks),
        (
            "attention.full_every",
            isinstance(attention, GqaAttention) and bool(attention.full_every),
        ),
        ("moe.latent_size", moe is not None and moe.latent_size is not None),
        ("moe.bias", moe is not None and moe.bias),
        ("moe.balance", moe is not None and moe.balance == "quantile"),
    )
    for field, there in parts:
        if there:
            rule = "Megatron-LM has no arguments for it"
            yield Violation(field=f"model.{field}", rule=rule, nearest_fix="use another target")


def _parallel_flags(plan: PlanFile) -> Iterator[Flag]:
    parallel = plan.parallel
    yield "--tensor-model-parallel-size", str(parallel.tp)
    yield "--pipeline-model-parallel-size", str(parallel.pp)
    yield "--context-parallel-size", str(parallel.cp)
    if parallel.cp > 1:
        style = {"ring": "p2p", "all_gather": "allgather", "ulysses": "a2a"}
        yield "--cp-comm-type", style[parallel.context_parallel]
    yield "--micro-batch-size", str(parallel.micro_batch_size)
    if parallel.tp > 1 and parallel.sequence_parallel:
        yield ("--sequence-parallel",)
    if plan.scenario.model.moe is not None:
        yield "--expert-model-parallel-size", str(parallel.ep)
        yield "--expert-tensor-parallel-size", str(parallel.etp)
    if parallel.pp > 1:
        yield from _pipeline_flags(plan)
    if parallel.zero_stage == 1:
        yield ("--use-distributed-optimizer",)
        if parallel.dp * parallel.cp > 1:
            yield ("--overlap-grad-reduce",)
            yield ("--overlap-param-gather",)
    if parallel.zero_stage > 1:
        strategy = "optim_grads" if parallel.zero_stage == 2 else "optim_grads_params"
        yield ("--use-megatron-fsdp",)
        yield "--data-parallel-sharding-strategy", strategy
        yield ("--use-distributed-optimizer",)


def _load_flags(plan: PlanFile) -> Iterator[Flag]:
    load = plan.scenario.workload.expert_load
    if load.kind == "capacity" and plan.scenario.model.moe is not None:
        yield "--moe-expert-capacity-factor", f"{load.capacity_factor:g}"
        yield ("--moe-pad-expert-input-to-capacity",)


def _pipeline_flags(plan: PlanFile) -> Iterator[Flag]:
    layout, parallel = layout_of(plan), plan.parallel
    if layout is not None:
        yield "--pipeline-model-parallel-layout", layout
    elif parallel.vpp > 1:
        layers = plan.scenario.model.num_layers // parallel.num_chunks
        yield "--num-layers-per-virtual-pipeline-stage", str(layers)


def layout_of(plan: PlanFile) -> str | None:
    """Returns Megatron's layout of a plan with uneven chunks; None where they are even."""
    parallel, layers = plan.parallel, plan.scenario.model.num_layers
    sizes = parallel.layers_per_stage or even_split(layers, parallel.num_chunks)
    return None if len(set(sizes)) == 1 else pipeline_layout(sizes)


def pipeline_layout(sizes: tuple[int, ...]) -> str:
    """Returns Megatron's layout of uneven chunks: E embedding, t a layer, L head and loss."""
    chunks = ["t" * n for n in sizes]
    chunks[0] = f"E{chunks[0]}"
    chunks[-1] = f"{chunks[-1]}L"
    return "|".join(chunks)


def _memory_flags(plan: PlanFile) -> Iterator[Flag]:
    parallel = plan.parallel
    if parallel.recompute == "full":
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "uniform" if parallel.recompute_layers is None else "block"
        yield "--recompute-num-layers", str(parallel.recompute_layers or 1)
    if parallel.recompute == "selective":
        yield "--recompute-granularity", "selective"
        modules = recompute_modules(plan)
        yield ("--recompute-modules", *modules)
    if parallel.optimizer_offload:
        yield ("--optimizer-cpu-offload",)
        yield "--optimizer-offload-fraction", "1.0"


def recompute_modules(plan: PlanFile) -> tuple[str, ...]:
    """Returns Megatron's names of what a selective policy computes again."""
    tags = plan.parallel.recompute_tags or ("norm", "swiglu", "mla_up")
    moe = plan.scenario.model.moe is not None
    mla = isinstance(plan.scenario.model.attention, MlaAttention)
    names = {
        MODULES[t]
        for t in tags
        if t in MODULES and (mla or t != "mla_up") and (moe or MODULES[t] != "moe_act")
    }
    return tuple(sorted(names)) or ("core_attn",)


def _workload_flags(workload: Workload) -> Iterator[Flag]:
    precision, optimizer, rate = workload.precision, workload.optimizer, workload.learning_rate
    samples = sum(level.steps * level.batch for level in workload.batch_levels)
    yield "--seq-length", str(workload.seq_len)
    yield "--global-batch-size", str(workload.global_batch_size)
    if workload.batch_ramp is not None:
        ramp = workload.batch_ramp
        ramped = str(-(-ramp.tokens // workload.seq_len))
        yield "--rampup-batch-size", str(ramp.start), str(ramp.increment), ramped
    yield "--train-samples", str(samples)
    if precision.compute in {"bf16", "fp16"}:
        yield (f"--{precision.compute}",)
    yield from _format_flags(workload)
    yield "--lr", f"{rate.peak:g}"
    yield "--lr-warmup-samples", str(_samples_before(workload, rate.warmup_steps))
    yield "--lr-decay-style", "WSD" if rate.kind == "wsd" else rate.kind
    if rate.kind != "constant":
        yield "--min-lr", f"{rate.final:g}"
    if rate.hold_until_tokens is not None:
        held = rate.hold_until_tokens // workload.seq_len
        yield "--lr-wsd-decay-samples", str(max(samples - held, 1))
        yield "--lr-wsd-decay-style", "cosine"
    yield "--optimizer", "adam"
    yield "--weight-decay", f"{optimizer.weight_decay:g}"
    yield "--adam-beta1", f"{optimizer.beta1:g}"
    yield "--adam-beta2", f"{optimizer.beta2:g}"
    yield "--adam-eps", f"{optimizer.eps:g}"
    yield "--clip-grad", f"{optimizer.gradient_clip or 0:g}"
    yield "--seed", str(workload.seed or 1)


def _samples_before(workload: Workload, step: int) -> int:
    """Returns the sequences that the steps before `step` took."""
    return sum(
        level.batch * min(level.steps, max(0, step - level.first_step))
        for level in workload.batch_levels
    )


def _format_flags(workload: Workload) -> Iterator[Flag]:
    precision = workload.precision
    recipe = {
        "fp8_tensor": ("hybrid", "tensorwise"),
        "fp8_block": ("e4m3", "blockwise"),
        "mxfp8": ("e4m3", "mxfp8"),
    }.get(precision.gemm)
    if recipe is not None:
        yield "--fp8-format", recipe[0]
        yield "--fp8-recipe", recipe[1]
    if precision.gemm == "nvfp4":
        yield "--fp4-format", "e2m1"
        yield "--fp4-recipe", "nvfp4"
    if precision.gradients == "fp32" and precision.compute != "fp32":
        yield ("--accumulate-allreduce-grads-in-fp32",)
    if precision.optimizer_state != "fp32":
        yield ("--use-precision-aware-optimizer",)
        yield "--exp-avg-dtype", precision.optimizer_state
        yield "--exp-avg-sq-dtype", precision.optimizer_state


def not_expressed(plan: PlanFile) -> tuple[str, ...]:
    """Returns what of the plan Megatron-LM's arguments do not say."""
    parallel, model = plan.parallel, plan.scenario.model
    precision = plan.scenario.workload.precision
    tags = set(parallel.recompute_tags or ("norm", "swiglu", "mla_up"))
    windowed = isinstance(model.attention, GqaAttention) and model.attention.first_window_layer
    own = that_apply(
        (
            (
                plan.scenario.workload.optimizer.kind == "muon",
                "Muon: the arguments name AdamW; a Megatron-LM with a Muon optimizer takes its "
                "own --optimizer",
            ),
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
                bool(windowed),
                "layers that see everything below first_window_layer: --window-size is for all",
            ),
            (
                precision.weights != precision.compute,
                f"weights in {precision.weights}: they are kept in {precision.compute}",
            ),
            (
                precision.master_weights not in {"fp32", "none"},
                f"master weights in {precision.master_weights}: they are kept in fp32",
            ),
            (
                precision.master_weights == "none" and precision.compute != "fp32",
                "no master weights: an fp32 copy is kept",
            ),
        )
    )
    return own + unsaid(plan, *_NO_FLAG)


_NO_FLAG: Final = (
    "momentum",
    "qk_clip",
    "lora",
    "power_law",
    "data_parallel",
    "fp8_activations",
    "activation_offload",
    "gradient_offload",
    "parameter_offload",
    *NOWHERE,
)
