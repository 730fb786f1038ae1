"""A DeepSpeed JSON configuration becomes a scenario and a plan.

Keys: DeepSpeed 0.19, `deepspeed/runtime/config.py`. The JSON does not say the context
length or the pipeline: both are given, and stand among the assumptions.
"""

from __future__ import annotations

import json
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.planner.import_.imported import ImportedRun, assemble, data_parallel_size
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.model import ModelSpec

_READ: Final = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "bf16",
        "fp16",
        "data_types",
        "zero_optimization",
        "tensor_parallel",
        "sequence_parallel_size",
        "activation_checkpointing",
        "steps_per_print",
        "wall_clock_breakdown",
    }
)


def import_deepspeed(
    text: str,
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    gpus: int,
    seq_len: int,
    pp: int = 1,
    name: str = "deepspeed",
) -> ImportedRun:
    """Returns the job of a DeepSpeed JSON.

    Args:
        gpus: ranks of the job.
        seq_len, pp: what the JSON does not hold.

    Raises:
        InputError: no JSON object, "auto" values, a broken batch identity or plan.
    """
    config = _load(text)
    tensor, context = _size(config, "tensor_parallel"), config.get("sequence_parallel_size", 1)
    dp = data_parallel_size(gpus, tp=tensor, cp=context, pp=pp)
    batch = _batch(config, dp)
    zero = config.get("zero_optimization") or {}
    parallel: dict[str, Any] = {
        "tp": tensor,
        "pp": pp,
        "cp": context,
        # DeepSpeed's sequence parallelism exchanges heads for tokens (arXiv 2309.14509).
        "context_parallel": "ulysses" if context > 1 else "ring",
        "dp_shard": dp,
        "micro_batch_size": batch["train_micro_batch_size_per_gpu"],
        "zero_stage": zero.get("stage", 0),
        "optimizer_offload": _offloads(zero, "offload_optimizer"),
        "parameter_offload": _offloads(zero, "offload_param"),
    }
    assumed = [f"seq_len {seq_len} and pp {pp}: given, the JSON holds neither"]
    if config.get("activation_checkpointing"):
        parallel["recompute"] = "full"
        assumed.append("recompute full: activation_checkpointing stands in the JSON")
    compute = (
        "bf16" if _enabled(config, "bf16") else "fp16" if _enabled(config, "fp16") else "fp32"
    )
    sums = (config.get("data_types") or {}).get("grad_accum_dtype") or compute
    workload: dict[str, Any] = {
        "seq_len": seq_len,
        "global_batch_size": batch["train_batch_size"],
        "precision": {
            "compute": compute,
            "weights": compute,
            "gradients": sums,
            "master_weights": "none" if compute == "fp32" else "fp32",
        },
        "learning_rate": {"warmup_steps": 0},
    }
    not_read = [key for key in config if key not in _READ]
    return assemble(name, model, cluster, workload, parallel, assumed=assumed, not_read=not_read)


def _load(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"the DeepSpeed configuration is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError("the DeepSpeed configuration must be a JSON object")
    autos = [key for key, value in config.items() if value == "auto"]
    if autos:
        raise InputError(
            [
                Violation(
                    field=key,
                    value="auto",
                    rule="is filled in by the training program",
                    nearest_fix="write the number that the running job uses",
                )
                for key in autos
            ]
        )
    return config


def _size(config: dict[str, Any], key: str) -> int:
    return int((config.get(key) or {}).get("autotp_size", 1))


def _enabled(config: dict[str, Any], key: str) -> bool:
    return bool((config.get(key) or {}).get("enabled", False))


def _offloads(zero: dict[str, Any], key: str) -> bool:
    return bool((zero.get(key) or {}).get("device", "none") != "none")


def _batch(config: dict[str, Any], dp: int) -> dict[str, int]:
    """Returns the three batch fields; two give the third, as DeepSpeed fills them in."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, steps = (config.get(n) for n in names)
    if micro is None:
        micro = (whole or 0) // (dp * (steps or 1))
    if whole is None:
        whole = micro * dp * (steps or 1)
    if steps is None:
        steps = whole // max(micro * dp, 1)
    if whole < 1 or whole != micro * dp * steps:
        raise InputError(
            Violation(
                field="train_batch_size",
                value=str(whole),
                rule="must be train_micro_batch_size_per_gpu * gradient_accumulation_steps * "
                f"data-parallel size ({micro} * {steps} * {dp})",
                nearest_fix=f"use {max(micro, 1) * max(steps, 1) * dp}, or give the job's --gpus",
            )
        )
    return dict(zip(names, (whole, micro, steps), strict=True))
