"""torchtitan 0.2.2's TOML job file of a plan.

Fields: torchtitan 0.2.2, `torchtitan/config/job_config.py`. A model is one of torchtitan's
flavors; 0.3 replaced TOML by Python configurations, so the header pins the version.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from flopwright.errors import InputError, Violation
from flopwright.plan.file import PlanFile
from flopwright.planner.export.target import header
from flopwright.planner.export.text import TargetFile, omission_lines, that_apply
from flopwright.planner.export.unsaid import NOWHERE, unsaid
from flopwright.spec.model import ModelSpec

FILE: Final = "torchtitan.toml"
Value = str | int | float | bool
Table = dict[str, Value]


class _Flavor(NamedTuple):
    """A model that torchtitan 0.2.2 has, known by its shape."""

    name: str
    flavor: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_experts: int
    pipelines: bool


_FLAVORS: Final = (
    _Flavor("llama3", "8B", 4096, 32, 32, 0, True),
    _Flavor("llama3", "70B", 8192, 80, 64, 0, True),
    _Flavor("llama3", "405B", 16384, 126, 128, 0, True),
    _Flavor("deepseek_v3", "16B", 2048, 27, 16, 64, True),
    _Flavor("deepseek_v3", "236B", 5120, 60, 128, 160, True),
    _Flavor("deepseek_v3", "671B", 7168, 61, 128, 256, True),
    _Flavor("qwen3", "0.6B", 1024, 28, 16, 0, False),
    _Flavor("qwen3", "1.7B", 2048, 28, 16, 0, False),
    _Flavor("qwen3", "4B", 2560, 36, 32, 0, False),
    _Flavor("qwen3", "8B", 4096, 36, 32, 0, False),
    _Flavor("qwen3", "14B", 5120, 40, 40, 0, False),
    _Flavor("qwen3", "32B", 5120, 64, 64, 0, False),
    _Flavor("qwen3", "30B-A3B", 2048, 48, 32, 128, False),
    _Flavor("qwen3", "235B-A22B", 4096, 94, 64, 128, False),
)
_SCHEDULES: Final = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}


def torchtitan_file(plan: PlanFile) -> TargetFile:
    """Returns the TOML of the plan.

    Raises:
        InputError: every part of the plan that torchtitan 0.2.2 cannot run.
    """
    tables, omitted = torchtitan_config(plan), _not_expressed(plan)
    body = "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )
    run = "# run_train.sh or: torchrun ... -m torchtitan.train --job.config_file torchtitan.toml\n"
    text = header(plan, "torchtitan") + run + omission_lines(omitted) + body
    return TargetFile(name=FILE, text=text, omitted=omitted)


def torchtitan_config(plan: PlanFile) -> dict[str, Table]:
    """Returns the tables of the job file.

    Raises:
        InputError: every part of the plan that torchtitan 0.2.2 cannot run.
    """
    model, workload = plan.scenario.model, plan.scenario.workload
    flavor = _flavor(model)
    _check(plan, flavor)
    assert flavor is not None
    rate, optimizer = workload.learning_rate, workload.optimizer
    scheduler: Table = {"warmup_steps": rate.warmup_steps}
    if rate.kind == "constant":
        scheduler |= {"decay_ratio": 0.0}
    else:
        decay = "linear" if rate.kind == "linear" else "cosine"
        scheduler |= {"decay_type": decay, "min_lr_factor": rate.final / rate.peak}
    if rate.kind == "wsd":
        assert rate.hold_until_tokens is not None
        scheduler["decay_ratio"] = 1 - rate.hold_until_tokens / workload.total_tokens
    return {
        "job": {"description": plan.name},
        "model": {"name": flavor.name, "flavor": flavor.flavor},
        "optimizer": {
            "name": "AdamW",
            "lr": rate.peak,
            "beta1": optimizer.beta1,
            "beta2": optimizer.beta2,
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
        },
        "lr_scheduler": scheduler,
        "training": _training(plan),
        "parallelism": _parallelism(plan),
        "activation_checkpoint": _checkpointing(plan),
        "metrics": {"log_freq": 10},
    }


def _flavor(model: ModelSpec) -> _Flavor | None:
    experts = model.moe.num_experts if model.moe is not None else 0
    shape = (model.hidden_size, model.num_layers, model.attention.num_heads, experts)
    found = [f for f in _FLAVORS if f[2:6] == shape]
    return found[0] if found else None


def _check(plan: PlanFile, flavor: _Flavor | None) -> None:
    parallel, precision = plan.parallel, plan.scenario.workload.precision
    found = []
    if flavor is None:
        names = sorted({f"{f.name} {f.flavor}" for f in _FLAVORS})
        found.append(
            Violation(
                field="model",
                value=plan.scenario.model.name,
                rule="torchtitan 0.2.2 has no flavor of this shape",
                nearest_fix=f"known: {', '.join(names)}",
            )
        )
    elif parallel.pp > 1 and not flavor.pipelines:
        found.append(
            Violation(
                field="parallel.pp",
                value=str(parallel.pp),
                rule=f"torchtitan 0.2.2 runs {flavor.name} without pipeline stages only",
                nearest_fix="use pp 1",
            )
        )
    if parallel.pp > 1 and parallel.schedule not in _SCHEDULES:
        found.append(
            Violation(
                field="parallel.schedule",
                value=parallel.schedule,
                rule="torchtitan has no such schedule",
                nearest_fix=f"use one of {', '.join(_SCHEDULES)}",
            )
        )
    if parallel.zero_stage == 1 and parallel.dp_shard > 1:
        found.append(
            Violation(
                field="parallel.zero_stage",
                value="1",
                rule="torchtitan (FSDP2) shards weights and gradients, not the optimizer alone",
                nearest_fix="use zero_stage 3, or 2 (weights stay gathered after forward)",
            )
        )
    if precision.compute not in {"bf16", "fp32"}:
        found.append(
            Violation(
                field="workload.precision.compute",
                value=precision.compute,
                rule="torchtitan computes in bf16 or fp32",
                nearest_fix="use bf16",
            )
        )
    if found:
        raise InputError(found)


def _training(plan: PlanFile) -> Table:
    workload, parallel = plan.scenario.workload, plan.parallel
    names = {"bf16": "bfloat16", "fp32": "float32"}
    # A pipeline's local batch is cut into micro-batches of pipeline_parallel_microbatch_size.
    local = workload.global_batch_size // parallel.dp if parallel.pp > 1 else None
    return {
        "local_batch_size": local or parallel.micro_batch_size,
        "global_batch_size": workload.global_batch_size,
        "seq_len": workload.seq_len,
        "max_norm": workload.optimizer.gradient_clip or 1e9,
        "steps": workload.num_steps,
        "enable_cpu_offload": parallel.optimizer_offload or parallel.parameter_offload,
        "mixed_precision_param": names[workload.precision.compute],
        "mixed_precision_reduce": "float32",
        "dtype": names.get(workload.precision.master_weights, "float32"),
    }


def _parallelism(plan: PlanFile) -> Table:
    parallel = plan.parallel
    # Without ZeRO the whole of data parallelism is replication.
    replicate = parallel.dp if parallel.zero_stage == 0 else parallel.dp_replicate
    out: Table = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": parallel.dp // replicate,
        "fsdp_reshard_after_forward": "never" if parallel.zero_stage == 2 else "default",
        "tensor_parallel_degree": parallel.tp,
        "pipeline_parallel_degree": parallel.pp,
        "context_parallel_degree": parallel.cp,
        "expert_parallel_degree": parallel.ep,
        "expert_tensor_parallel_degree": parallel.etp,
    }
    if parallel.pp > 1:
        out["pipeline_parallel_schedule"] = _SCHEDULES[parallel.schedule]
        out["pipeline_parallel_microbatch_size"] = parallel.micro_batch_size
    return out


def _checkpointing(plan: PlanFile) -> Table:
    if plan.parallel.recompute == "selective":
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": plan.parallel.recompute}


def _not_expressed(plan: PlanFile) -> tuple[str, ...]:
    parallel, workload = plan.parallel, plan.scenario.workload
    moved = [n for n in _MOVES if getattr(parallel, n)]
    own = that_apply(
        (
            (
                0 < len(moved) < len(_MOVES),
                f"{', '.join(moved)} alone: enable_cpu_offload moves weights, gradients and "
                "optimizer state together",
            ),
            (workload.optimizer.kind == "muon", "Muon: torchtitan 0.2.2 trains with AdamW"),
            (
                parallel.layers_per_stage is not None,
                f"layers_per_stage {parallel.layers_per_stage}: torchtitan's own split",
            ),
            (
                parallel.recompute == "selective",
                "its selective option 'op' keeps matrix products and collectives instead",
            ),
        )
    )
    return own + unsaid(plan, *_NO_FIELD)


_MOVES: Final = ("optimizer_offload", "gradient_offload", "parameter_offload")
_NO_FIELD: Final = (
    "momentum",
    "qk_clip",
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
    "fp8_activations",
    "activation_offload",
    "mtp",
    *NOWHERE,
)
