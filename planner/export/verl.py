"""verl's overrides of a plan: the training side of its actor.

Fields: verl 0.9.1, `verl/trainer/config/ppo_trainer.yaml` and the groups it composes (Hydra).
The plan says how the actor trains; rollouts, rewards and the algorithm are verl's own, and
what had to be chosen for them is listed. The file is an array of overrides for a shell.

Two engines: Megatron's for plans with tensor, pipeline or expert parallelism or an optimizer
sharded alone, FSDP2 for weights sharded without them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Final

from flopwright.errors import InputError, Violation
from flopwright.plan.file import PlanFile
from flopwright.planner.export.megatron import MEGATRON_SCHEDULES, layout_of, recompute_modules
from flopwright.planner.export.target import header, placement
from flopwright.planner.export.text import TargetFile, omission_lines
from flopwright.planner.export.verl_omits import not_expressed, uses_fsdp

FILE: Final = "verl_args.sh"
# Sequences are prompts and responses: the plan has their sum only.
PROMPT_SHARE: Final = 4
_ACTOR: Final = "actor_rollout_ref.actor"
_DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16"}
# Characters that Hydra's grammar reads in a value.
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./+-]+|\[[A-Za-z0-9_.,+-]*\]")
Override = tuple[str, str]


def verl_file(plan: PlanFile) -> TargetFile:
    """Returns the overrides as a shell array, one a line.

    Raises:
        InputError: every part of the plan that verl cannot train.
    """
    omitted = not_expressed(plan)
    lines = "\n".join(f"  {shlex.quote(text)}" for text in verl_overrides(plan))
    text = (
        header(plan, "verl")
        + '# source this file, then: python3 -m verl.trainer.main_ppo "${VERL_ARGS[@]}" \\\n'
        + "#   actor_rollout_ref.model.path=MODEL data.train_files=DATA data.val_files=DATA\n"
        + omission_lines(omitted)
        + f"VERL_ARGS=(\n{lines}\n)\n"
    )
    return TargetFile(name=FILE, text=text, omitted=omitted)


def verl_overrides(plan: PlanFile) -> tuple[str, ...]:
    """Returns Hydra's overrides; those that add a key to an open record begin with "+".

    Raises:
        InputError: every part of the plan that verl cannot train.
    """
    _check(plan)
    engine = _fsdp(plan) if uses_fsdp(plan.parallel) else _megatron(plan)
    return tuple(f"{key}={_value(value)}" for key, value in (*_common(plan), *engine))


def _value(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else f'"{text}"'


def _check(plan: PlanFile) -> None:
    parallel, workload = plan.parallel, plan.scenario.workload
    found = []

    def refuse(field: str, value: object, rule: str, fix: str) -> None:
        found.append(Violation(field=field, value=str(value), rule=rule, nearest_fix=fix))

    if parallel.pp > 1 and parallel.schedule not in MEGATRON_SCHEDULES:
        fix = "use 1f1b, or interleaved_1f1b with vpp above 1"
        refuse("parallel.schedule", parallel.schedule, "verl's engines have no such one", fix)
    if parallel.zero_stage > 1 and not uses_fsdp(parallel):
        rule = "verl shards weights and gradients without tp, pp and ep only (FSDP2)"
        refuse(
            "parallel.zero_stage", parallel.zero_stage, rule, "use zero_stage 1, or no tp and ep"
        )
    if uses_fsdp(parallel) and parallel.cp > 1 and parallel.context_parallel != "ulysses":
        rule = "verl's FSDP engine exchanges heads for tokens"
        refuse("parallel.context_parallel", parallel.context_parallel, rule, "use ulysses")
    if workload.precision.compute not in _DTYPES:
        rule = "verl's engines compute in bf16 or fp16"
        refuse("workload.precision.compute", workload.precision.compute, rule, "use bf16")
    if workload.lora_rank is not None:
        rule = "adapters are not written: their targets have other names in each engine"
        refuse("workload.lora_rank", workload.lora_rank, rule, "leave it out")
    if plan.scenario.cluster.node.gpu.kind == "cpu":
        refuse("cluster.node.gpu", plan.scenario.cluster.node.gpu.name, "verl trains on GPUs", "")
    if found:
        raise InputError(found)


def _common(plan: PlanFile) -> Iterator[Override]:
    workload, parallel, where = plan.scenario.workload, plan.parallel, placement(plan)
    prompt = workload.seq_len // PROMPT_SHARE
    micro = str(parallel.micro_batch_size)
    yield "model_engine", "dp" if uses_fsdp(parallel) else "megatron"
    yield "trainer.nnodes", str(where.nodes)
    yield "trainer.n_gpus_per_node", str(where.ranks_per_node)
    yield "trainer.total_training_steps", str(workload.num_steps)
    yield "algorithm.adv_estimator", "grpo"
    yield "data.train_batch_size", str(workload.global_batch_size)
    yield "data.max_prompt_length", str(prompt)
    yield "data.max_response_length", str(workload.seq_len - prompt)
    yield "data.seed", str(workload.seed)
    yield f"{_ACTOR}.ppo_mini_batch_size", str(workload.global_batch_size)
    yield f"{_ACTOR}.ppo_micro_batch_size_per_gpu", micro
    yield f"{_ACTOR}.use_dynamic_bsz", "False"
    yield f"{_ACTOR}.data_loader_seed", str(workload.seed)
    yield "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", micro
    yield "actor_rollout_ref.rollout.name", "vllm"
    yield "actor_rollout_ref.rollout.n", "1"
    yield "actor_rollout_ref.rollout.tensor_model_parallel_size", str(where.ranks_per_node)
    yield "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", micro


def _optimizer(plan: PlanFile) -> Iterator[Override]:
    """Yields what both engines' optimizers have."""
    workload, at = plan.scenario.workload, f"{_ACTOR}.optim"
    optimizer, rate = workload.optimizer, workload.learning_rate
    yield f"{at}.lr", f"{rate.peak:g}"
    yield f"{at}.lr_warmup_steps", str(rate.warmup_steps)
    yield f"{at}.total_training_steps", str(workload.num_steps)
    yield f"{at}.weight_decay", f"{optimizer.weight_decay:g}"
    yield f"{at}.betas", f"[{optimizer.beta1:g},{optimizer.beta2:g}]"
    yield f"{at}.clip_grad", f"{optimizer.gradient_clip or 0:g}"


def _megatron(plan: PlanFile) -> Iterator[Override]:
    parallel, at = plan.parallel, f"{_ACTOR}.megatron"
    yield f"{at}.tensor_model_parallel_size", str(parallel.tp)
    yield f"{at}.pipeline_model_parallel_size", str(parallel.pp)
    if parallel.vpp > 1:
        yield f"{at}.virtual_pipeline_model_parallel_size", str(parallel.vpp)
    yield f"{at}.context_parallel_size", str(parallel.cp)
    if plan.scenario.model.moe is not None:
        yield f"{at}.expert_model_parallel_size", str(parallel.ep)
        yield f"{at}.expert_tensor_parallel_size", str(parallel.etp)
    yield f"{at}.sequence_parallel", str(parallel.tp > 1 and parallel.sequence_parallel)
    yield f"{at}.use_distributed_optimizer", str(parallel.zero_stage == 1)
    yield f"{at}.seed", str(plan.scenario.workload.seed)
    yield f"{at}.dtype", _DTYPES[plan.scenario.workload.precision.compute]
    yield from _transformer(plan, f"{at}.override_transformer_config")
    yield from _optimizer(plan)
    yield from _megatron_optimizer(plan, f"{_ACTOR}.optim")


def _transformer(plan: PlanFile, at: str) -> Iterator[Override]:
    """Yields fields of Megatron Core's TransformerConfig."""
    parallel, load = plan.parallel, plan.scenario.workload.expert_load
    layout = layout_of(plan)
    if layout is not None:
        yield f"+{at}.pipeline_model_parallel_layout", layout
    if parallel.cp > 1:
        styles = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a"}
        yield f"+{at}.cp_comm_type", styles[parallel.context_parallel]
    if parallel.recompute == "full":
        yield f"{at}.recompute_granularity", "full"
        yield f"{at}.recompute_method", "uniform" if parallel.recompute_layers is None else "block"
        yield f"{at}.recompute_num_layers", str(parallel.recompute_layers or 1)
    if parallel.recompute == "selective":
        yield f"{at}.recompute_granularity", "selective"
        yield f"{at}.recompute_modules", f"[{','.join(recompute_modules(plan))}]"
    recipe = plan.scenario.workload.precision.gemm
    fp8 = {
        "fp8_tensor": ("hybrid", "tensorwise"),
        "fp8_block": ("e4m3", "blockwise"),
        "mxfp8": ("e4m3", "mxfp8"),
    }.get(recipe)
    if fp8 is not None:
        yield f"+{at}.fp8", fp8[0]
        yield f"+{at}.fp8_recipe", fp8[1]
    if recipe == "nvfp4":
        yield f"+{at}.fp4", "e2m1"
    if load.kind == "capacity" and plan.scenario.model.moe is not None:
        yield f"+{at}.moe_expert_capacity_factor", f"{load.capacity_factor:g}"
        yield f"+{at}.moe_pad_expert_input_to_capacity", "True"


def _megatron_optimizer(plan: PlanFile, at: str) -> Iterator[Override]:
    workload, precision = plan.scenario.workload, plan.scenario.workload.precision
    optimizer, rate, more = workload.optimizer, workload.learning_rate, "override_optimizer_config"
    yield f"{at}.optimizer", "muon" if optimizer.kind == "muon" else "adam"
    if optimizer.kind == "muon":
        yield f"{at}.muon_momentum", f"{optimizer.momentum:g}"
        yield f"{at}.muon_match_adamw_update_rms", "True"
    yield f"{at}.lr_decay_style", "WSD" if rate.kind == "wsd" else rate.kind
    if rate.kind != "constant":
        yield f"{at}.min_lr", f"{rate.final:g}"
        yield f"{at}.lr_decay_steps", str(workload.num_steps)
    if rate.hold_until_tokens is not None:
        held = workload.steps_within(rate.hold_until_tokens)
        yield f"{at}.lr_wsd_decay_steps", str(max(workload.num_steps - held, 1))
        yield f"{at}.lr_wsd_decay_style", "cosine"
    yield f"+{at}.{more}.adam_eps", f"{optimizer.eps:g}"
    if precision.optimizer_state != "fp32" or plan.parallel.optimizer_offload:
        yield f"{at}.use_precision_aware_optimizer", "True"
        yield f"{at}.exp_avg_dtype", precision.optimizer_state
        yield f"{at}.exp_avg_sq_dtype", precision.optimizer_state
    if precision.gradients != "fp32":
        yield f"{at}.main_grads_dtype", precision.gradients
    if plan.parallel.optimizer_offload:
        yield f"+{at}.{more}.optimizer_cpu_offload", "True"
        yield f"+{at}.{more}.optimizer_offload_fraction", "1.0"


def _fsdp(plan: PlanFile) -> Iterator[Override]:
    parallel, workload, at = plan.parallel, plan.scenario.workload, f"{_ACTOR}.fsdp_config"
    rate, precision = workload.learning_rate, workload.precision
    yield f"{_ACTOR}.strategy", "fsdp2"
    yield f"{at}.strategy", "fsdp2"
    # FSDP2 shards over the replicas' own ranks, those that cut a sequence among them.
    yield f"{at}.fsdp_size", str(parallel.dp_shard * parallel.cp)
    yield f"{at}.reshard_after_forward", str(parallel.zero_stage == 3)
    yield f"{at}.offload_policy", str(parallel.parameter_offload or parallel.optimizer_offload)
    yield f"{_ACTOR}.ulysses_sequence_parallel_size", str(parallel.cp)
    yield f"{at}.ulysses_sequence_parallel_size", str(parallel.cp)
    yield f"{at}.seed", str(workload.seed)
    yield f"{at}.dtype", _DTYPES[precision.compute]
    yield f"{at}.model_dtype", "fp32" if precision.master_weights == "fp32" else precision.weights
    yield (
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        str(parallel.recompute == "full"),
    )
    yield "actor_rollout_ref.model.enable_activation_offload", str(parallel.activation_offload)
    yield from _optimizer(plan)
    yield f"{_ACTOR}.grad_clip", f"{workload.optimizer.gradient_clip or 0:g}"
    kind = "constant" if rate.kind == "constant" else "cosine"
    yield f"{_ACTOR}.optim.lr_scheduler_type", kind
    if rate.kind != "constant":
        yield f"{_ACTOR}.optim.min_lr_ratio", f"{rate.final / rate.peak:g}"
