"""One layer of every kind of a model on one rank, as a software stack holds it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopwright.models.temporaries.cost import backward_moments, fullest
from flopwright.ops import ShardShape
from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.memory.parameters import adapter_counts, param_counts
from flopwright.simulator.memory.profile import MemoryProfile
from flopwright.simulator.memory.stack_lives import kept_bytes, stack_lives
from flopwright.simulator.training.layers import EMBEDDING, HEAD, chunk_kinds, representatives
from flopwright.simulator.training.routing import busiest_over_mean
from flopwright.spec.model import ModelSpec
from flopwright.spec.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLayer:
    """One layer of a kind. Bytes are for one micro-batch, numbers those of one rank.

    Attributes:
        kept, whole: saved under the policy, and all of it.
        temporary: the fullest moment of its backward beyond what it kept.
        held, dense, matrix, expert: numbers as in ParamCounts.
        adapters, expert_adapters: numbers of LoRA adapters beside them.
    """

    kept: float
    whole: float
    temporary: float
    held: float
    dense: float
    matrix: float
    expert: float
    adapters: float
    expert_adapters: float


def padded(model: ModelSpec, tp: int, pad_to: int) -> ModelSpec:
    """Returns the model with its vocabulary padded so that each rank's part is a multiple."""
    step = pad_to * tp
    vocab = -(-model.vocab_size // step) * step
    return model if vocab == model.vocab_size else model.model_copy(update={"vocab_size": vocab})


def _shape(scenario: Scenario, plan: ParallelPlan) -> ShardShape:
    return ShardShape(
        micro_batch_size=plan.micro_batch_size,
        seq_len=scenario.workload.seq_len,
        tp=plan.tp,
        ep=plan.ep,
        cp=plan.cp,
        etp=plan.etp,
        sequence_parallel=plan.sequence_parallel,
        expert_load=busiest_over_mean(
            scenario.model.moe, scenario.workload.expert_load, np.array([float(plan.ep)])
        ),
        dtype=scenario.workload.precision.compute,
    )


def stack_layers(
    scenario: Scenario, plan: ParallelPlan, profile: MemoryProfile
) -> dict[str, StackLayer]:
    """Returns one layer of every kind of the model."""
    model = padded(scenario.model, plan.tp, profile.pad_vocab_to)
    shape, workload = _shape(scenario, plan), scenario.workload
    fp8 = workload.precision.gemm != "same" or workload.precision.compute == "fp8"
    frozen = workload.lora_rank is not None
    separate = profile.weight_gradients == "separate" and not frozen
    tp, ep = np.array([float(plan.tp)]), np.array([float(plan.ep * plan.etp)])
    out = {}
    for kind, layer in representatives(model).items():
        lives = stack_lives(model, layer, shape, profile, fp8=fp8, frozen=frozen)
        whole = float(lives.bytes.sum())
        is_layer = kind not in {EMBEDDING, HEAD}
        kept = float(kept_bytes(lives, plan, profile, kind).kept[0]) if is_layer else whole
        moments = backward_moments(model, layer, shape, 1, fused_weight_gradients=not separate)
        counts = param_counts(model, layer, tp, ep)
        adapters = adapter_counts(
            model,
            layer,
            tp,
            ep,
            workload.lora_rank or 0,
            targets=profile.lora,
        )
        out[kind] = StackLayer(
            kept=kept,
            whole=whole,
            temporary=float(fullest(moments)[0]) if is_layer else 0.0,
            held=float(counts.held[0]),
            dense=float(counts.dense[0]),
            matrix=float(counts.dense_matrix[0]),
            expert=float(counts.expert[0]),
            adapters=float(adapters.dense[0]),
            expert_adapters=float(adapters.expert[0]),
        )
    return out


def chunk_layers(scenario: Scenario, plan: ParallelPlan) -> list[dict[str, int]]:
    """Returns how many layers of each kind every chunk holds, embedding and head among them."""
    names = list(representatives(scenario.model))
    counts = chunk_kinds(scenario.model, plan.pp, plan.vpp, plan.layers_per_stage)
    return [
        {k: int(n) for k, n in zip(names, column, strict=True) if n} for column in counts.T
    ]  # fmt: skip
