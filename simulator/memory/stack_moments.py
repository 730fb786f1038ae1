"""The fullest moment of a stage under a software stack's habits.

The loss, the head's backward, a layer's backward, the table's gradient and the update: what
stands at each beside weights and optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopwright.kernels.linear_cross_entropy.cost import PARTS
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.placement import chunks_of_stage
from flopwright.simulator.memory.in_flight import in_flight
from flopwright.simulator.memory.profile import MemoryProfile
from flopwright.simulator.memory.stack_layers import StackLayer, chunk_layers, padded
from flopwright.simulator.memory.stack_states import StackStates
from flopwright.simulator.memory.stages import OFFLOAD_BUFFERS
from flopwright.simulator.training.layers import EMBEDDING, HEAD
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.scenario import Scenario


def _chunk_bytes(
    plan: ParallelPlan, layers: dict[str, StackLayer], kinds: dict[str, int]
) -> float:
    """Returns what a chunk keeps of a micro-batch; its first layers may alone run again."""
    again = plan.recompute_layers if plan.recompute == "full" else None
    left = sum(kinds.values()) if again is None else again
    total = 0.0
    for kind, count in kinds.items():  # in model order
        dropped = count if kind in {EMBEDDING, HEAD} else min(count, left)
        left -= 0 if kind in {EMBEDDING, HEAD} else dropped
        total += dropped * layers[kind].kept + (count - dropped) * layers[kind].whole
    return total


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes that stand beside weights and optimizer state at one moment of a step."""

    activations: float
    temporaries: float
    gradients: float

    @property
    def total(self) -> float:
        """All together."""
        return self.activations + self.temporaries + self.gradients


@dataclass(frozen=True, slots=True)
class StagePeaks:
    """The fullest moment of a stage, the fullest before the update, and what the host holds."""

    peak: Moment
    before_update: float
    host: float


def stage_peaks(
    scenario: Scenario,
    plan: ParallelPlan,
    profile: MemoryProfile,
    layers: dict[str, StackLayer],
    stage: int,
    state: StackStates,
) -> StagePeaks:
    """Returns the peaks of `stage`, which holds `state` and runs `layers`."""
    kinds = chunk_layers(scenario, plan)
    mine = chunks_of_stage(plan, stage)
    logits = _logits(scenario, plan, profile)
    waiting = profile.kept_logit_bytes * logits
    kept = np.array([_chunk_bytes(plan, layers, kinds[c]) for c in mine])
    kept = kept + np.array([waiting if HEAD in kinds[c] else 0.0 for c in mine])
    m = max(plan.num_microbatches(scenario.workload.global_batch_size), 1)
    held = float((in_flight(plan.schedule, plan.pp, plan.vpp, m)[stage] @ kept).max())
    away = 0.0
    if plan.activation_offload:
        away = max(held - OFFLOAD_BUFFERS * float(kept.max()), 0.0)
        held -= away
    # Gradients that no earlier micro-batch made come one by one as activations go.
    early = 0.0 if profile.frees_gradients and m == 1 else state.gradients
    names = {k for c in mine for k in kinds[c]}
    ordinary = [layers[k] for k in names - {EMBEDDING, HEAD}]
    layer = max((x.whole - x.kept + x.temporary for x in ordinary), default=0.0)
    # By then the head of this micro-batch is done and its logits are gone.
    before = held - (waiting if HEAD in names else 0.0)
    moments = [Moment(before, layer + state.layer_buffers, early)]
    if HEAD in names:
        loss = (profile.logit_bytes - profile.kept_logit_bytes) * logits
        moments.append(Moment(held, loss + state.loss_buffers, early))
        head = profile.logit_gradient_bytes * logits + _head_gradient(scenario, plan, profile)
        moments.append(Moment(before, head + state.loss_buffers, early))
    if EMBEDDING in names:
        others = max(held - float(kept[mine.index(0)]), 0.0)
        width = DTYPE_BYTES[scenario.workload.precision.compute]
        table = 0.0 if scenario.workload.lora_rank else layers[EMBEDDING].dense * width
        moments.append(Moment(others, table + state.layer_buffers, state.gradients))
    update = Moment(0.0, state.update, state.gradients)
    return StagePeaks(
        peak=max([*moments, update], key=lambda x: x.total),
        before_update=max(x.total for x in moments),
        host=away,
    )


def _logits(scenario: Scenario, plan: ParallelPlan, profile: MemoryProfile) -> float:
    """Returns the logits that stand on a rank at once."""
    model = padded(scenario.model, plan.tp, profile.pad_vocab_to)
    tokens = plan.micro_batch_size * scenario.workload.seq_len / plan.cp
    cut = plan.tp if profile.cuts_logits else 1
    chunks = max(profile.loss_chunks, PARTS if plan.fused_loss else 1)
    return tokens * model.vocab_size / cut / chunks


def _head_gradient(scenario: Scenario, plan: ParallelPlan, profile: MemoryProfile) -> float:
    """Returns the bytes of the tensor that autograd is handed for the head's weight."""
    if scenario.workload.lora_rank is not None or profile.weight_gradients == "fused":
        return 0.0
    model = padded(scenario.model, plan.tp, profile.pad_vocab_to)
    width = DTYPE_BYTES[scenario.workload.precision.compute]
    return model.vocab_size * model.hidden_size / plan.tp * width
