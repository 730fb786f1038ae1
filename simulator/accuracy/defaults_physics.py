"""Silent defaults that physics refuses: memory beyond the card, rates beyond the processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flopwright.plan.parallel import ParallelPlan, RecomputeName
from flopwright.simulator.accuracy.defaults import Assumed
from flopwright.spec.flops import hardware_flops_per_token, model_flops_per_token
from flopwright.spec.model import MlaAttention, ModelSpec
from flopwright.spec.parameters import num_params
from flopwright.spec.scenario import Scenario

# Large matrix products reach at most this share of a datasheet's dense peak, on every
# processor that there are operator tables of (flopwright/simulator/hardware/efficiency).
BEST_SHARE_OF_PEAK: Final = 0.85
# Predicted memory may be off by so much before it speaks against a plan.
_MEMORY_ROOM: Final = 1.1
_BEYOND_MEASURED: Final = 1.3
# Bytes of training state a parameter, mixed precision with AdamW: weight 2, gradient 4, master
# weight and two moments 12 (arXiv 1910.02054, 3.1, with FP32 gradients).
_WEIGHT_BYTES, _GRADIENT_BYTES, _STATE_BYTES = 2.0, 4.0, 12.0
# Logits, their FP32 copy and their gradient, a logit.
_LOGIT_BYTES: Final = 10.0
# Stacks whose recipes are known not to recompute: a rough peak does not overrule that.
_TRUSTED: Final = frozenset({"nemo", "megatron_bridge", "mlperf", "megatron", "jax"})


def settled_recompute(
    scenario: Scenario,
    plan: ParallelPlan,
    framework: str,
    measured_step_s: float | None,
    memory: Mapping[str, float],
    assumed: Assumed,
) -> ParallelPlan:
    """Returns the plan with a recompute policy that its row does not state and physics allows.

    A policy is refused if it needs more FLOP/s than a processor gives, or (outside of stacks
    whose recipes are known) more memory than the card has or than was measured.
    """
    if plan.recompute == "full" and _too_fast(scenario, plan, measured_step_s):
        assumed.replace("recompute", "no recompute: with it the run would beat the peak")
        return _with(plan, "none")
    if plan.recompute != "none" or framework in _TRUSTED:
        return plan
    full = _with(plan, "full")
    if _too_fast(scenario, full, measured_step_s):
        return plan
    needs = rough_peak_bytes(scenario, plan), rough_peak_bytes(scenario, full)
    limit = float(scenario.cluster.node.gpu.hbm_bytes) * _MEMORY_ROOM
    seen = [v for k, v in memory.items() if k in ("allocated", "reserved", "smi", "unknown")]
    if seen:
        limit = min(limit, max(seen) * _BEYOND_MEASURED)
    if needs[0] <= limit or needs[1] >= needs[0]:
        return plan
    assumed.replace("recompute", "full recompute: without it the run would not have fitted")
    assumed.flags.add("recompute-by-memory")
    return full


def rough_peak_bytes(scenario: Scenario, plan: ParallelPlan) -> float:
    """Returns about the bytes that the fullest rank needs: enough to tell none from full.

    State over its shards, plus activations of the micro-batches in flight on the first stage
    (arXiv 2205.05198, 4, with fused attention: nothing is saved of the scores), plus logits.
    """
    model, work = scenario.model, scenario.workload
    ranks = plan.tp * plan.pp
    shards = (plan.zero_stage >= 3, plan.zero_stage >= 2, plan.zero_stage >= 1)
    parts = (_WEIGHT_BYTES, _GRADIENT_BYTES, _STATE_BYTES)
    if work.lora_rank is not None:
        parts = (_WEIGHT_BYTES, 0.0, 0.0)
    each = sum(b / (plan.dp_shard if s else 1) for b, s in zip(parts, shards, strict=True))
    cut = plan.tp if plan.sequence_parallel else 1
    tokens = plan.micro_batch_size * work.seq_len / plan.cp
    in_flight = min(plan.pp, plan.num_microbatches(work.global_batch_size))
    layers = -(-model.num_layers // plan.pp) * in_flight
    saved = _saved_bytes(model) / cut
    kept = 2.0 * model.hidden_size / cut * layers + saved if plan.recompute == "full" else (
        saved * layers
    )  # fmt: skip
    logits = _LOGIT_BYTES * model.vocab_size / plan.tp
    return num_params(model) * each / ranks + tokens * (kept + logits)


def _saved_bytes(model: ModelSpec) -> float:
    """Returns bytes that one layer saves for a token, BF16, without recompute."""
    attn, moe = model.attention, model.moe
    heads = attn.num_heads if isinstance(attn, MlaAttention) else attn.num_kv_heads
    q, kv = attn.num_heads * attn.qk_head_dim, heads * (attn.qk_head_dim + attn.v_head_dim)
    width = float(model.mlp.intermediate_size)
    if moe is not None:
        width = moe.expert_intermediate_size * float(moe.top_k + moe.num_shared_experts)
    matrices = 6.0 if model.mlp.gated or moe is not None else 4.0
    routed = 4.0 * model.hidden_size * moe.top_k if moe is not None else 0.0
    return 8.0 * model.hidden_size + 4.0 * q + 2.0 * kv + matrices * width + routed


def _with(plan: ParallelPlan, recompute: RecomputeName) -> ParallelPlan:
    change = {"recompute": recompute, "recompute_tags": (), "recompute_layers": None}
    return plan.model_copy(update=change)


def beats_the_peak(scenario: Scenario, plan: ParallelPlan, measured_step_s: float) -> bool:
    """Returns whether a step would need more FLOP/s than the datasheet's dense peak.

    A value with such a step was read in another unit or of other work than was meant.
    """
    return _share_of_peak(scenario, plan, measured_step_s) > 1


def _too_fast(scenario: Scenario, plan: ParallelPlan, measured_step_s: float | None) -> bool:
    if measured_step_s is None:
        return False
    return _share_of_peak(scenario, plan, measured_step_s) > BEST_SHARE_OF_PEAK


def _share_of_peak(scenario: Scenario, plan: ParallelPlan, measured_step_s: float) -> float:
    work, gpu = scenario.workload, scenario.cluster.node.gpu
    count = hardware_flops_per_token if plan.recompute == "full" else model_flops_per_token
    flops = count(scenario.model, work.seq_len, "causal_half") * work.tokens_per_step
    if work.lora_rank is not None:
        flops *= 2 / 3  # frozen weights have no gradients of their own
    dtype = {"same": work.precision.compute, "nvfp4": "fp4"}.get(work.precision.gemm, "fp8")
    peaks = {str(name): value for name, value in gpu.peak_flops_per_s.items()}
    peak = max(peaks.get(name, 0.0) for name in (dtype, work.precision.compute))
    return flops / (measured_step_s * plan.world_size) / peak if peak > 0 else 0.0
