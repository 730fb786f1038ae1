"""Suspects among kernels: a class, by what predictions with it half as slow again change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from flopwright.plan.parallel import ParallelPlan
from flopwright.report.causes import Array, Seen, Suspect
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.comparison.parts import Parts, predicted_parts, stage_of_rank
from flopwright.simulator.training.kernels import KERNELS
from flopwright.spec.scenario import Scenario

# Kernel classes that may be slow together: one kernel library makes them.
_TOGETHER: Final = {
    "attention": ("attention", "attention_backward"),
    "gemm": ("gemm", "grouped_gemm", "head"),
}
_STEP: Final = 0.5  # a kernel class is tried half as slow again


def kernel_suspects(
    scenario: Scenario,
    plan: ParallelPlan,
    calibration: Calibration,
    parts: Parts,
    seen: Sequence[Seen],
) -> list[Suspect]:
    """Returns a suspect a kernel class, and those that one library makes together."""
    names = [k for k in KERNELS if any(k in stage for stage in parts.kernel_s)]
    alone = {
        k: _kernel_parts(scenario, plan, calibration, parts, seen, k)
        for k in names
        if k != "optimizer"
    }
    unseen = not any(s.of == "kernel" for s in seen)
    out = [Suspect(kind="kernel", name=k, parts=v, inferred=unseen) for k, v in alone.items()]
    for name, members in _TOGETHER.items():
        held = [alone[k] for k in members if k in alone]
        if len(held) > 1:
            together = np.sum(held, axis=0)
            out.append(Suspect(kind="kernel", name=f"all {name}", parts=together, inferred=unseen))
    return out


def _kernel_parts(
    scenario: Scenario,
    plan: ParallelPlan,
    calibration: Calibration,
    parts: Parts,
    seen: Sequence[Seen],
    kernel: str,
) -> Array:
    """Returns what a kernel class takes of everything seen: how predictions move with it."""
    factors = dict(calibration.kernel_factors)
    factors[kernel] = factors.get(kernel, 1.0) * (1 + _STEP)
    slower = predicted_parts(
        scenario, plan, calibration.model_copy(update={"kernel_factors": factors})
    )
    return np.array([_moved(s, plan, parts, slower, kernel) for s in seen])


def _moved(seen: Seen, plan: ParallelPlan, parts: Parts, slower: Parts, kernel: str) -> float:
    stage = stage_of_rank(plan, seen.ranks[0])
    if seen.of == "kernel":
        own = parts.kernel_s[stage]
        # where a profiler cannot tell the head's product from others, it is among them
        if kernel == "head" and seen.name == "gemm" and seen.predicted > own.get("gemm", 0.0):
            return own.get("head", 0.0)
        return own.get(kernel, 0.0) if seen.name == kernel else 0.0
    if seen.of != "time":
        return 0.0
    before = parts.time_s[stage].get(seen.name, 0.0)
    return (slower.time_s[stage].get(seen.name, 0.0) - before) / _STEP


def comparable_kernels(
    predicted: Mapping[str, float], measured: Mapping[str, float]
) -> dict[str, float]:
    """Returns predicted kernel classes as a profiler tells them apart.

    By a kernel's name the head's product is a product like the others.
    """
    out = dict(predicted)
    if "head" in out and "head" not in measured:
        out["gemm"] = out.get("gemm", 0.0) + out.pop("head")
    return out
