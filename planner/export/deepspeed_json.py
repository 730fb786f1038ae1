"""DeepSpeed 0.19's configuration of a plan.

DeepSpeed accepts unknown top-level keys without a word, so `unknown_keys` compares against
the keys its parser reads (deepspeed/runtime/config.py and constants.py, 0.19.8).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from flopwright.errors import Violation, did_you_mean
from flopwright.plan.file import PlanFile
from flopwright.planner.export.text import that_apply
from flopwright.planner.export.unsaid import NOWHERE, unsaid

# Top-level keys that 0.19.8 reads and an export may write.
KNOWN_KEYS: Final = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "steps_per_print",
        "bf16",
        "fp16",
        "data_types",
        "zero_optimization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "sequence_parallel_size",
        "tensor_parallel",
        "activation_checkpointing",
        "wall_clock_breakdown",
        "flops_profiler",
        "communication_data_type",
    }
)

# Elements a bucket. DeepSpeed's default is 5e8; a bucket never needs more than what the
# largest stage holds, and small models keep several buckets so that reduction overlaps.
_BUCKET_ELEMENTS: Final = 500_000_000
_SUB_GROUP_ELEMENTS: Final = 1_000_000_000


def deepspeed_config(plan: PlanFile) -> dict[str, Any]:
    """Returns the plan as the dictionary that DeepSpeed's parser reads.

    The three batch fields obey DeepSpeed's identity: train_batch_size =
    train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel size.
    """
    parallel, workload = plan.parallel, plan.scenario.workload
    precision = workload.precision
    config: dict[str, Any] = {
        "train_batch_size": workload.global_batch_size,
        "train_micro_batch_size_per_gpu": parallel.micro_batch_size,
        "gradient_accumulation_steps": parallel.num_microbatches(workload.global_batch_size),
        "steps_per_print": 10,
        "bf16": {"enabled": precision.compute == "bf16"},
        "zero_optimization": _zero(plan),
        # the training program brings its own optimizer (no operator is built at start)
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    }
    if precision.compute == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
    if precision.gradients in {"fp32", "bf16", "fp16"}:
        config["data_types"] = {"grad_accum_dtype": precision.gradients}
    if workload.optimizer.gradient_clip is not None:
        config["gradient_clipping"] = workload.optimizer.gradient_clip
    if parallel.cp > 1:
        config["sequence_parallel_size"] = parallel.cp
    if parallel.tp > 1:
        config["tensor_parallel"] = {"autotp_size": parallel.tp}
    if parallel.optimizer_offload:
        config["zero_force_ds_cpu_optimizer"] = False
    if parallel.recompute == "full":
        config["activation_checkpointing"] = {
            "partition_activations": False,
            "cpu_checkpointing": parallel.activation_offload,
            "number_checkpoints": max(map(len, _stage_layers(plan))),
        }
    return config


def _stage_layers(plan: PlanFile) -> tuple[tuple[int, ...], ...]:
    return plan.parallel.stage_layers(plan.scenario.model.num_layers)


def _zero(plan: PlanFile) -> dict[str, Any]:
    parallel = plan.parallel
    zero: dict[str, Any] = {
        "stage": parallel.zero_stage,
        # a pipeline's schedule orders the reduction itself
        "overlap_comm": parallel.pp == 1 and parallel.dp > 1,
        "contiguous_gradients": parallel.pp == 1,
        "reduce_scatter": True,
        "reduce_bucket_size": _BUCKET_ELEMENTS,
        "allgather_bucket_size": _BUCKET_ELEMENTS,
    }
    if parallel.optimizer_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if parallel.parameter_offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if parallel.zero_stage == 3:
        zero["sub_group_size"] = _SUB_GROUP_ELEMENTS
        hidden = plan.scenario.model.hidden_size
        # one layer's largest matrix ahead; vectors of a few rows stay on every rank
        zero["stage3_prefetch_bucket_size"] = hidden * hidden
        zero["stage3_param_persistence_threshold"] = 10 * hidden
        zero["stage3_max_live_parameters"] = 1_000_000_000
    return zero


def deepspeed_json(plan: PlanFile) -> str:
    """Returns `deepspeed_config` as JSON text (no comments in JSON: see the manifest)."""
    config = deepspeed_config(plan)
    assert not unknown_keys(config), unknown_keys(config)
    return json.dumps(config, indent=2) + "\n"


def unknown_keys(config: Mapping[str, Any]) -> tuple[Violation, ...]:
    """Returns one violation for each top-level key that DeepSpeed would silently ignore."""
    return tuple(
        Violation(
            field=key,
            rule="DeepSpeed ignores this key silently",
            nearest_fix=did_you_mean(key, KNOWN_KEYS),
        )
        for key in config
        if key not in KNOWN_KEYS
    )


def not_expressed(plan: PlanFile) -> tuple[str, ...]:
    """Returns what of the plan the DeepSpeed file cannot say; the training program does it."""
    parallel, precision = plan.parallel, plan.scenario.workload.precision
    own = that_apply(
        (
            (
                parallel.pp > 1,
                f"pp {parallel.pp} with schedule {parallel.schedule}"
                + (f" and vpp {parallel.vpp}" if parallel.vpp > 1 else "")
                + ": the program builds the stages and runs gradient_accumulation_steps "
                "micro-batches",
            ),
            (
                parallel.layers_per_stage is not None,
                f"layers_per_stage {parallel.layers_per_stage}: the program cuts the model",
            ),
            (parallel.ep > 1, f"ep {parallel.ep}: the program makes the expert groups"),
            (
                parallel.dp_replicate > 1 and parallel.zero_stage > 0,
                f"dp_replicate {parallel.dp_replicate} x dp_shard {parallel.dp_shard}: "
                "ZeRO shards over all data-parallel ranks",
            ),
            (
                precision.compute not in {"bf16", "fp16", "fp32"},
                f"compute dtype {precision.compute}: DeepSpeed has no switch for it",
            ),
        )
    )
    offload = () if parallel.recompute == "full" else ("activation_offload",)
    return own + unsaid(plan, *_PROGRAMS_OWN, *offload)


# What the training program passes or does itself, beside the JSON.
_PROGRAMS_OWN: Final = (
    "optimizer",
    "learning_rate",
    "qk_clip",
    "budget",
    "seq_len",
    "seed",
    "formats",
    "gemm",
    "lora",
    "expert_load",
    "batch_ramp",
    "data_parallel",
    "recompute",
    "context_parallel",
    "sequence_parallel",
    "etp",
    "fp8_activations",
    "gradient_offload",
    "mtp",
    *NOWHERE,
)
