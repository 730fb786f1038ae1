"""A torchtitan 0.2 TOML job file becomes a scenario and a plan.

Fields: torchtitan 0.2.2, `torchtitan/config/job_config.py`.
"""

from __future__ import annotations

import tomllib
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.planner.import_.imported import ImportedRun, assemble, data_parallel_size
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.model import ModelSpec

_SCHEDULES: Final = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved_1f1b",
    "ZBVZeroBubble": "zb_v",
    "DualPipeV": "dualpipe_v",
}
# Tables that say nothing of time or memory.
_SILENT: Final = frozenset(
    {"job", "metrics", "checkpoint", "profiling", "validation", "debug", "comm", "experimental"}
)
_READ: Final = frozenset(
    {"model", "optimizer", "lr_scheduler", "training", "parallelism", "activation_checkpoint"}
)


def import_torchtitan(
    text: str, model: ModelSpec, cluster: ClusterSpec, *, gpus: int, name: str = "torchtitan"
) -> ImportedRun:
    """Returns the job of a torchtitan TOML.

    Raises:
        InputError: no TOML, a schedule we do not have, or a plan that breaks a rule.
    """
    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the torchtitan job file is no TOML: {error}") from error
    sizes, training = config.get("parallelism", {}), config.get("training", {})
    axis = {
        "tp": int(sizes.get("tensor_parallel_degree", 1)),
        "pp": int(sizes.get("pipeline_parallel_degree", 1)),
        "cp": int(sizes.get("context_parallel_degree", 1)),
    }
    dp = data_parallel_size(gpus, **axis)
    replicate = int(sizes.get("data_parallel_replicate_degree", 1))
    if dp % replicate:
        raise InputError(
            Violation(
                field="parallelism.data_parallel_replicate_degree",
                value=str(replicate),
                rule=f"must divide the {dp} data-parallel ranks",
            )
        )
    local = int(training.get("local_batch_size", 8))
    micro = int(sizes.get("pipeline_parallel_microbatch_size", 1)) if axis["pp"] > 1 else local
    whole = int(training.get("global_batch_size", -1))
    if whole < 1:
        whole = local * dp  # torchtitan's default: no gradient accumulation
    sharded = dp > replicate
    keeps = sizes.get("fsdp_reshard_after_forward", "default") == "never"
    parallel: dict[str, Any] = {
        **axis,
        "dp_replicate": replicate,
        "dp_shard": dp // replicate,
        "ep": int(sizes.get("expert_parallel_degree", 1)),
        "etp": int(sizes.get("expert_tensor_parallel_degree", 1)),
        "micro_batch_size": micro,
        "data_parallel": "fsdp2",
        "zero_stage": 0 if not sharded else 2 if keeps else 3,
        "optimizer_offload": bool(training.get("enable_cpu_offload", False)),
        "parameter_offload": bool(training.get("enable_cpu_offload", False)),
        **_schedule(sizes, axis["pp"]),
        **_recompute(config),
    }
    parallel["zero_stage"], assumed = _with_pipeline(parallel)
    compute = {"bfloat16": "bf16", "float32": "fp32"}[
        training.get("mixed_precision_param", "bfloat16")
    ]
    seq = int(training.get("seq_len", 2048))
    workload: dict[str, Any] = {
        "seq_len": seq,
        "global_batch_size": whole,
        "total_tokens": int(training.get("steps", 10000)) * whole * seq,
        "precision": {
            "compute": compute,
            "weights": compute,
            "gradients": "fp32",
            "master_weights": "fp32" if compute != "fp32" else "none",
        },
        "learning_rate": {"warmup_steps": 0},
    }
    not_read = [f"[{table}]" for table in config if table not in _READ | _SILENT]
    return assemble(name, model, cluster, workload, parallel, assumed=assumed, not_read=not_read)


def _schedule(sizes: dict[str, Any], pp: int) -> dict[str, Any]:
    if pp == 1:
        return {}
    said = str(sizes.get("pipeline_parallel_schedule", "1F1B"))
    schedule = _SCHEDULES.get(said)
    if schedule is None:
        raise InputError(
            Violation(
                field="parallelism.pipeline_parallel_schedule",
                value=said,
                rule="no such schedule is simulated",
                nearest_fix=f"known: {', '.join(_SCHEDULES)}",
            )
        )
    # torchtitan gives schedules of several chunks a rank two of them.
    return {"schedule": schedule, "vpp": 1 if schedule in {"gpipe", "1f1b"} else 2}


def _recompute(config: dict[str, Any]) -> dict[str, Any]:
    mode = config.get("activation_checkpoint", {}).get("mode", "selective")
    if mode == "memory_budget":
        raise InputError(
            Violation(
                field="activation_checkpoint.mode",
                value=mode,
                rule="what a memory budget keeps is the compiler's choice",
                nearest_fix="use none, selective or full",
            )
        )
    return {"recompute": mode}


def _with_pipeline(parallel: dict[str, Any]) -> tuple[int, list[str]]:
    """Returns the ZeRO stage a plan may have, and what that leaves out."""
    stage = int(parallel["zero_stage"])
    if parallel["pp"] == 1 or stage < 2:
        return stage, []
    return 1, ["zero_stage 1: FSDP under a pipeline is taken as a sharded optimizer"]
