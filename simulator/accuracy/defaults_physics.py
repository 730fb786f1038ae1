"""Silent defaults that physics refuses: memory beyond the card, rates beyond the processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan, RecomputeName
from flopwright.simulator.accuracy.defaults import Assumed
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.flops import hardware_flops_per_token, model_flops_per_token
from flopwright.spec.scenario import Scenario

# Large matrix products reach at most this share of a datasheet's dense peak, on every
# processor that there are operator tables of (flopwright/simulator/hardware/efficiency).
BEST_SHARE_OF_PEAK: Final = 0.85
# Predicted memory may be off by so much before it speaks against a plan.
_MEMORY_ROOM: Final = 1.1
_BEYOND_MEASURED: Final = 1.3
# Stacks whose recipes are known not to recompute: a predicted peak does not overrule that.
_TRUSTED: Final = frozenset({"nemo", "megatron_bridge", "mlperf", "megatron", "jax", "megascale"})


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
    try:
        peaks = evaluate(scenario, Candidates.from_plans([plan, full])).peak_bytes
    except InputError:
        return plan
    limit = float(scenario.cluster.node.gpu.hbm_bytes) * _MEMORY_ROOM
    seen = [v for k, v in memory.items() if k in ("allocated", "reserved", "smi", "unknown")]
    if seen:
        limit = min(limit, max(seen) * _BEYOND_MEASURED)
    if peaks[0] <= limit or peaks[1] >= peaks[0]:
        return plan
    assumed.replace("recompute", "full recompute: without it the run would not have fitted")
    assumed.flags.add("recompute-by-memory")
    return full


def _with(plan: ParallelPlan, recompute: RecomputeName) -> ParallelPlan:
    change = {"recompute": recompute, "recompute_tags": (), "recompute_layers": None}
    return plan.model_copy(update=change)


def _too_fast(scenario: Scenario, plan: ParallelPlan, measured_step_s: float | None) -> bool:
    if measured_step_s is None:
        return False
    work, gpu = scenario.workload, scenario.cluster.node.gpu
    count = hardware_flops_per_token if plan.recompute == "full" else model_flops_per_token
    flops = count(scenario.model, work.seq_len, "causal_half") * work.tokens_per_step
    if work.lora_rank is not None:
        flops *= 2 / 3  # frozen weights have no gradients of their own
    dtype = {"same": work.precision.compute, "nvfp4": "fp4"}.get(work.precision.gemm, "fp8")
    peak = max(
        gpu.peak_flops_per_s.get(d, 0.0)
        for d in (dtype, work.precision.compute)  # type: ignore[call-overload]
    )
    return flops / (measured_step_s * plan.world_size) > BEST_SHARE_OF_PEAK * peak > 0
