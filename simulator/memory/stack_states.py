"""Weights, gradients, optimizer state and their buffers on a rank, under a stack's habits.

Rajbhandari et al. (arXiv 1910.02054): weights are cut over the data-parallel ranks from ZeRO
stage 3 on, gradients from 2, optimizer state from 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.memory.profile import MemoryProfile
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNumbers:
    """Numbers that a rank would hold if nothing were cut over data-parallel ranks.

    Attributes:
        held: all of them; dense, expert: the trainable ones outside and inside the experts;
            matrix: those of dense that are hidden matrices.
        in_layers: matrices of the layers, the experts' among them.
        adapters, expert_adapters: trained beside the weights where adapters alone are (LoRA).
        largest_group: of one layer; root: of embedding, final norm and head.
    """

    held: float
    dense: float
    matrix: float
    expert: float
    in_layers: float
    largest_group: float
    root: float
    adapters: float = 0.0
    expert_adapters: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StackStates:
    """Bytes on a rank.

    Attributes:
        moments: the part of `optimizer` that the first update makes.
        standing: buffers that stay once made (gradient buckets, placeholders, FP8 copies).
        update: short-lived, during the update.
        layer_buffers, loss_buffers: gathered weights and gradients under way while a layer
            runs backward, and at the loss.
    """

    weights: float
    gradients: float
    optimizer: float
    moments: float
    standing: float
    update: float
    layer_buffers: float
    loss_buffers: float
    host: float

    @property
    def resident(self) -> float:
        """What is there between two steps."""
        return self.weights + self.gradients + self.optimizer + self.standing


def states(
    scenario: Scenario, plan: ParallelPlan, profile: MemoryProfile, numbers: RankNumbers
) -> StackStates:
    """Returns the states of a rank that holds `numbers`."""
    widths = _widths(scenario, profile)
    cuts, adapters = _Cuts.of(plan), scenario.workload.lora_rank is not None
    if adapters:
        dense, expert, matrix = numbers.adapters, numbers.expert_adapters, numbers.adapters
        weights = _frozen_weights(scenario, profile, numbers, cuts) + widths.weight * (
            dense + expert
        )
    else:
        dense, expert, matrix = numbers.dense, numbers.expert, numbers.matrix
        buffers = numbers.held - dense - expert
        weights = widths.weight * (cuts.of_stage(3, dense, expert) + buffers)
    gradients = widths.gradient * cuts.of_stage(2, dense, expert)
    mine = cuts.of_stage(1, dense, expert)
    moments = _moment_bytes(scenario, widths, cuts, matrix, dense, expert)
    optimizer = widths.master * mine + moments
    gathered, reducing = _groups(scenario, plan, profile, numbers)
    away = {
        "weights": (plan.parameter_offload, weights),
        "gradients": (plan.gradient_offload, gradients),
        "optimizer": (plan.optimizer_offload, optimizer),
    }
    here = {name: 0.0 if on else nbytes for name, (on, nbytes) in away.items()}
    offloaded = plan.optimizer_offload
    return StackStates(
        **here,
        moments=0.0 if offloaded else moments,
        standing=_standing(scenario, plan, profile, numbers),
        update=0.0 if offloaded else profile.step_gradient_bytes * mine,
        layer_buffers=gathered + reducing,
        loss_buffers=gathered,
        host=sum(nbytes for on, nbytes in away.values() if on),
    )


@dataclass(frozen=True, slots=True)
class _Widths:
    weight: float
    gradient: float
    master: float
    moment: float


def _widths(scenario: Scenario, profile: MemoryProfile) -> _Widths:
    """Returns bytes a number: the profile's, or where it has none the workload's."""
    precision = scenario.workload.precision
    master = precision.master_weights

    def choose(own: float | None, dtype: str) -> float:
        return float(DTYPE_BYTES[dtype]) if own is None else own

    return _Widths(
        weight=choose(profile.weight_bytes, precision.weights),
        gradient=choose(profile.gradient_bytes, precision.gradients),
        master=0.0
        if master == "none" and profile.master_bytes is None
        else choose(profile.master_bytes, master),
        moment=choose(profile.moment_bytes, precision.optimizer_state),
    )


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Ranks that share one copy, outside and inside the experts, and the ZeRO stage."""

    dense: float
    expert: float
    zero_stage: int

    @classmethod
    def of(cls, plan: ParallelPlan) -> _Cuts:
        dense = plan.dp * plan.cp
        return cls(dense, max(dense * plan.tp // (plan.ep * plan.etp), 1), plan.zero_stage)

    def of_stage(self, stage: int, dense: float, expert: float) -> float:
        """Returns what is left of so many numbers where `stage` cuts them."""
        if self.zero_stage < stage:
            return dense + expert
        return dense / self.dense + expert / self.expert


def _frozen_weights(
    scenario: Scenario, profile: MemoryProfile, numbers: RankNumbers, cuts: _Cuts
) -> float:
    """Returns the bytes of weights that are not trained; tables keep the weights' own format."""
    precision = scenario.workload.precision
    own = DTYPE_BYTES[precision.weights]
    stored = float(DTYPE_BYTES[precision.frozen_weights or precision.weights])
    if profile.frozen_bytes is not None:
        stored = profile.frozen_bytes
    tables = numbers.held - numbers.in_layers
    total = tables * own + numbers.in_layers * stored
    return total / cuts.dense if cuts.zero_stage >= 3 else total


def _moment_bytes(
    scenario: Scenario, widths: _Widths, cuts: _Cuts, matrix: float, dense: float, expert: float
) -> float:
    """AdamW keeps two numbers a weight, Muon one of a hidden matrix."""
    each = scenario.workload.optimizer.states_per_matrix_weight
    mine = each * cuts.of_stage(1, matrix, expert) + 2 * cuts.of_stage(1, dense - matrix, 0.0)
    return widths.moment * mine


def _groups(
    scenario: Scenario, plan: ParallelPlan, profile: MemoryProfile, numbers: RankNumbers
) -> tuple[float, float]:
    """Returns (gathered weights, gradients on their way to the shards) of sharded weights."""
    if plan.zero_stage < 3 or plan.dp * plan.cp == 1:
        return 0.0, 0.0
    compute = DTYPE_BYTES[scenario.workload.precision.compute]
    root = numbers.root if profile.keeps_root else 0.0
    gathered = compute * (profile.fsdp * numbers.largest_group + root)
    if scenario.workload.lora_rank is not None:
        return gathered, 0.0
    each = compute + profile.reduce_bytes
    return gathered, each * numbers.largest_group + compute * root / 2


def _standing(
    scenario: Scenario, plan: ParallelPlan, profile: MemoryProfile, numbers: RankNumbers
) -> float:
    precision, frozen = scenario.workload.precision, scenario.workload.lora_rank is not None
    width = DTYPE_BYTES[precision.compute]
    total = 0.0
    if profile.weight_gradients == "dummy" and not frozen:
        total += width * _one_of_each_shape(scenario, plan)
    if plan.dp * plan.cp > 1 and not frozen:
        total += profile.buckets * min(profile.bucket_numbers, numbers.dense) * width
    if precision.gemm != "same" and not frozen:
        total += profile.fp8_weights * numbers.in_layers
    return total


def _one_of_each_shape(scenario: Scenario, plan: ParallelPlan) -> float:
    """Returns the numbers of one weight of every shape that a layer's products have.

    Queries, keys and values are one product, as are gate and up; experts share a shape.
    """
    model, tp = scenario.model, plan.tp
    attention, hidden = model.attention, model.hidden_size
    heads = attention.num_heads
    if attention.kind == "mla":
        rank = attention.q_lora_rank or 0
        query = rank * (hidden * tp + heads * attention.qk_head_dim)
        query += 0 if rank else hidden * heads * attention.qk_head_dim
        up = attention.qk_nope_head_dim + attention.v_head_dim
        latent = attention.kv_lora_rank + attention.qk_rope_head_dim
        total = query + hidden * latent * tp + attention.kv_lora_rank * heads * up
        total += heads * attention.v_head_dim * hidden
        if attention.indexer is not None:
            index = attention.indexer
            inner = index.num_heads * index.head_dim
            total += tp * (rank * inner + hidden * (index.head_dim + index.num_heads))
    else:
        total = hidden * attention.head_dim * 2 * (heads + attention.num_kv_heads)
    gate = 2 if model.mlp.gated else 1
    kinds = {model.is_moe_layer(i) for i in range(model.num_layers)}
    if False in kinds:
        total += (gate + 1) * hidden * model.mlp.intermediate_size
    moe = model.moe
    numbers = total / tp
    if moe is not None and True in kinds:
        numbers += 3 * hidden * moe.expert_intermediate_size / plan.etp
        numbers += 3 * hidden * moe.num_shared_experts * moe.expert_intermediate_size / tp
    return numbers
