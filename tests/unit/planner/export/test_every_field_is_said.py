"""What a target cannot express is an error or a listed omission, field by field.

Each field of the plan and of the workload is changed alone: the file, what it lists as left
out, or a refusal must say so. The header (it has the plan's short name) does not count.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import pytest

from flopwright.errors import InputError
from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.planner.export.accelerate import accelerate_file
from flopwright.planner.export.deepspeed_json import deepspeed_json, not_expressed
from flopwright.planner.export.registry import TARGETS
from flopwright.spec.base import Spec
from flopwright.spec.load import load_cluster, load_model, make_plan_file
from flopwright.spec.packing import DocumentLength, Packing
from flopwright.spec.phases import BatchRamp, LearningRate, TrainingPhase
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import ExpertLoad, Optimizer, Precision, Workload

CLUSTER = load_cluster("64_h100")
PHASE = TrainingPhase(name="long", total_tokens=10**9, learning_rate=LearningRate(warmup_steps=0))
IMAGE = "registry.example/train:1"


def _deepspeed(plan: PlanFile) -> str:
    return deepspeed_json(plan) + "\n".join(not_expressed(plan))


def _of(target: str) -> Callable[[PlanFile], str]:
    return lambda plan: _body(TARGETS[target](plan, IMAGE).text)


def _body(text: str) -> str:
    """The text without the header's names and hashes, but with the number of ranks."""
    head, rest = text.splitlines()[:2], text.splitlines()[2:]
    ranks = re.findall(r"on \d+ ranks", "\n".join(head))
    return "\n".join([*ranks, *rest])


# What each target says: its own file, for accelerate with the bundle's DeepSpeed JSON.
SAYS: Final[dict[str, Callable[[PlanFile], str]]] = {
    "deepspeed": _deepspeed,
    "accelerate": lambda plan: _deepspeed(plan) + _body(accelerate_file(plan).text),
    "megatron": _of("megatron"),
    "torchtitan": _of("torchtitan"),
    "verl": _of("verl"),
    "verl_fsdp": _of("verl"),
}
# The launchers start the bundle's own program, which reads plan.yaml: the whole plan.
LAUNCHERS: Final = ("dstack", "kubeflow", "skypilot")

MOE: Final = {"pp": 1, "tp": 1, "ep": 8, "dp_shard": 64, "zero_stage": 3, "recompute": "full"}
BASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "deepspeed": ("deepseek_v3", MOE),
    "accelerate": ("deepseek_v3", MOE),
    "megatron": (
        "deepseek_v3",
        {"pp": 4, "tp": 2, "ep": 4, "dp_shard": 8, "zero_stage": 1, "recompute": "full"},
    ),
    "torchtitan": ("deepseek_v3", MOE),
    "verl": (
        "deepseek_v3",
        {"pp": 4, "tp": 2, "ep": 4, "dp_shard": 8, "zero_stage": 1, "recompute": "full"},
    ),
    # its other engine
    "verl_fsdp": ("deepseek_v3", MOE | {"ep": 1}),
}
SCHEDULED: Final = {"vpp": 3, "schedule": "interleaved_1f1b", "pp": 5}


def _plan(target: str, parallel: dict[str, Any], workload: Workload) -> PlanFile:
    model, axes = BASES[target]
    scenario = Scenario(name="t", model=load_model(model), cluster=CLUSTER, workload=workload)
    split = ParallelPlan.model_validate(axes | parallel)
    return make_plan_file(scenario, split, "t")


WORKLOAD: Final = Workload(seq_len=4096, global_batch_size=512, total_tokens=10**12)

# A value of each field that is not the base's, with what has to change beside it.
PARALLEL: Final[dict[str, list[dict[str, Any]]]] = {
    "dp_replicate": [{"dp_replicate": 2, "dp_shard": "half"}],
    "dp_shard": [{"dp_shard": "half"}],
    "tp": [{"tp": 4, "dp_shard": "half"}],
    "pp": [{"pp": 2}],
    "vpp": [{"vpp": 2, "schedule": "interleaved_1f1b", "pp": 4}],
    "cp": [{"cp": 2, "dp_shard": "half"}],
    "ep": [{"ep": 2}],
    "micro_batch_size": [{"micro_batch_size": 2}],
    "zero_stage": [{"zero_stage": 0}, {"zero_stage": 2}],
    "data_parallel": [{"data_parallel": "fsdp2"}, {"data_parallel": "none"}],
    "schedule": [{"schedule": "gpipe", "pp": 4}, {"schedule": "zb_h1", "pp": 4}],
    "layers_per_stage": [{"layers_per_stage": (15, 15, 15, 16), "pp": 4}],
    "recompute": [{"recompute": "none"}, {"recompute": "selective"}],
    "fp8_activations": [{"fp8_activations": True}],
    "activation_offload": [{"activation_offload": True}],
    "optimizer_offload": [{"optimizer_offload": True}],
    "etp": [{"etp": 2}],
    "sequence_parallel": [{"sequence_parallel": False, "tp": 4}],
    "context_parallel": [{"context_parallel": c, "cp": 2} for c in ("all_gather", "ulysses")],
    "recompute_tags": [
        {"recompute": "selective", "recompute_tags": t} for t in (("norm",), ("moe",))
    ],
    "recompute_layers": [{"recompute_layers": 2}],
    "gradient_offload": [{"gradient_offload": True, "zero_stage": 2, "optimizer_offload": True}],
    "parameter_offload": [{"parameter_offload": True}],
    "fused_loss": [{"fused_loss": True}],
}
# Beside what each change stands: the same without the field, so that it alone differs.
NEUTRAL: Final[dict[str, Any]] = {
    "dp_replicate": 1,
    "vpp": 1,
    "schedule": "1f1b",
    "layers_per_stage": None,
    "sequence_parallel": True,
    "context_parallel": "ring",
    "recompute_tags": (),
    "gradient_offload": False,
}


def _changes(record: Spec, values: dict[str, list[dict[str, Any]]]) -> dict[str, list[Any]]:
    """The record with other values, by field; beside a value what gives it a meaning."""
    return {
        name: [record.model_copy(update=change) for change in found]
        for name, found in values.items()
    }


PRECISIONS: Final = _changes(
    WORKLOAD.precision,
    {
        "compute": [{"compute": "fp32"}],
        "weights": [{"weights": "fp32"}],
        "gradients": [{"gradients": "bf16"}],
        "master_weights": [{"master_weights": "none"}, {"master_weights": "bf16"}],
        "optimizer_state": [{"optimizer_state": "bf16"}],
        "gemm": [{"gemm": g} for g in ("fp8_block", "fp8_tensor", "mxfp8", "nvfp4")],
        "frozen_weights": [{"frozen_weights": "fp8"}],
    },
)
OPTIMIZERS: Final = _changes(
    WORKLOAD.optimizer,
    {
        "kind": [{"kind": "muon"}],
        "weight_decay": [{"weight_decay": 0.2}],
        "beta1": [{"beta1": 0.8}],
        "beta2": [{"beta2": 0.99}],
        "eps": [{"eps": 1e-7}],
        "momentum": [{"kind": "muon", "momentum": 0.9}],
        "gradient_clip": [{"gradient_clip": 0.5}, {"gradient_clip": None}],
        "qk_clip_tau": [{"qk_clip_tau": 100.0}],
        "per_head": [{"kind": "muon", "per_head": True}],
    },
)
RATES: Final[dict[str, list[LearningRate]]] = {
    "kind": [LearningRate(kind="constant"), LearningRate(kind="linear")],
    "peak": [LearningRate(peak=1e-4)],
    "final": [LearningRate(final=1e-5)],
    "warmup_steps": [LearningRate(warmup_steps=100)],
    "hold_until_tokens": [LearningRate(kind="wsd", hold_until_tokens=h * 10**11) for h in (3, 6)],
}
LOADS: Final = _changes(
    WORKLOAD.expert_load,
    {
        "kind": [{"kind": "power_law"}, {"kind": "capacity"}],
        "exponent": [{"kind": "power_law", "exponent": 0.5}],
        "capacity_factor": [{"kind": "capacity", "capacity_factor": 1.5}],
        "redundant_experts": [{"redundant_experts": 8}],
    },
)
WORKLOADS: Final[dict[str, list[dict[str, Any]]]] = {
    "seq_len": [{"seq_len": 8192}],
    "global_batch_size": [{"global_batch_size": 1024}],
    "total_tokens": [{"total_tokens": 2 * 10**12}],
    "precision": [
        {"precision": p, "lora_rank": None if p.frozen_weights is None else 16}
        for found in PRECISIONS.values()
        for p in found
    ],
    "optimizer": [{"optimizer": o} for found in OPTIMIZERS.values() for o in found],
    "learning_rate": [{"learning_rate": r} for found in RATES.values() for r in found],
    "seed": [{"seed": 7}],
    "lora_rank": [{"lora_rank": 16}],
    "lora_targets": [{"lora_rank": 16, "lora_targets": t} for t in ("attention", "qkv")],
    "expert_load": [{"expert_load": e} for found in LOADS.values() for e in found],
    "batch_ramp": [
        {"batch_ramp": BatchRamp(start=256, increment=128, tokens=t)} for t in (10**10, 10**11)
    ],
    "packing": [
        {"packing": Packing(lengths=lengths)}
        for lengths in ((), (DocumentLength(tokens=512, share=1.0),))
    ],
    "mixture": [{"mixture": "web"}],
    "rope_scaling": [{"rope_scaling": "none"}],
    "later_phases": [{"later_phases": (PHASE,)}],
}


def test_every_field_has_another_value_here() -> None:
    assert set(PARALLEL) == set(ParallelPlan.model_fields)
    assert set(WORKLOADS) == set(Workload.model_fields) - {"kind"}  # "pretrain" alone
    assert set(RATES) == set(LearningRate.model_fields)
    assert set(LOADS) == set(ExpertLoad.model_fields)
    assert {*PRECISIONS} == set(Precision.model_fields)
    assert {*OPTIMIZERS} == set(Optimizer.model_fields)
    assert set(SAYS) | set(LAUNCHERS) == {*TARGETS, "deepspeed", "verl_fsdp"}


def _said(target: str, parallel: dict[str, Any], workload: Workload) -> str | None:
    """What the target says of a plan; None where it refuses."""
    try:
        return SAYS[target](_plan(target, parallel, workload))
    except InputError:
        return None


@pytest.mark.parametrize("target", sorted(SAYS))
@pytest.mark.parametrize("field", sorted(PARALLEL))
def test_a_field_of_the_plan_is_said_listed_or_refused(target: str, field: str) -> None:
    half = BASES[target][1]["dp_shard"] // 2
    seen = set()
    for change in PARALLEL[field]:
        full = {k: half if v == "half" else v for k, v in change.items()}
        without = full | {field: NEUTRAL.get(field, BASES[target][1].get(field))}
        if without[field] is None and field not in NEUTRAL:
            del without[field]
        if field == "vpp":
            without["schedule"] = "1f1b"
        other = _said(target, full, WORKLOAD)
        assert other is None or other != _said(target, without, WORKLOAD), (field, full)
        assert other is None or other not in seen, (field, full)
        seen.add(other)


@pytest.mark.parametrize("target", sorted(SAYS))
@pytest.mark.parametrize("field", sorted(WORKLOADS))
def test_a_field_of_the_workload_is_said_listed_or_refused(target: str, field: str) -> None:
    base = _said(target, {}, WORKLOAD)
    assert base is not None
    seen = {base}
    missed = []
    for change in WORKLOADS[field]:
        said = _said(target, {}, WORKLOAD.model_copy(update=change))
        if said in seen and said is not None:
            missed.append(str(change))
        if said is not None:
            seen.add(said)
    assert not missed


@pytest.mark.parametrize("target", sorted(SAYS))
def test_multi_token_prediction_is_said_or_listed(target: str) -> None:
    plan = _plan(target, {}, WORKLOAD)
    model = plan.scenario.model.model_copy(update={"mtp_layers": 1})
    scenario = plan.scenario.model_copy(update={"model": model})
    assert SAYS[target](make_plan_file(scenario, plan.parallel, "t")) != SAYS[target](plan)


@pytest.mark.parametrize("target", LAUNCHERS)
def test_a_launcher_starts_the_program_that_reads_the_whole_plan(target: str) -> None:
    text = TARGETS[target](_plan("megatron", {}, WORKLOAD), IMAGE).text
    assert re.search(r"--plan\W+\S*plan\.yaml", text)


def test_the_bases_are_legal_plans() -> None:
    for target in BASES:
        plan = _plan(target, {}, WORKLOAD)
        assert not plan_violations(plan.parallel, plan.scenario), target
