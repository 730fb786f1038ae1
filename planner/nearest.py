"""Plans that do not fit: what they lack, where, and the smallest change that would fit."""

from __future__ import annotations

from typing import Final

import numpy as np

from flopwright.errors import Violation
from flopwright.planner.lacking import largest_classes, memory_of_stage, more_gpus
from flopwright.planner.ranking import Ints, Priced, layout_ids, objective_value
from flopwright.planner.result import InfeasiblePlan
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.candidates import CONTEXTS, RECOMPUTES, SCHEDULES, Candidates
from flopwright.spec.scenario import Scenario
from flopwright.units import show_bytes, show_seconds

# Axes by which a fix may differ, the cheapest change first.
_FIX_AXES: Final = (
    "layout",
    "fp8_activations",
    "recompute_tags",
    "recompute_layers",
    "recompute",
    "activation_offload",
    "optimizer_offload",
    "gradient_offload",
    "parameter_offload",
    "fused_loss",
    "zero_stage",
    "dp_replicate",
    "micro_batch_size",
    "vpp",
    "schedule",
    "context_parallel",
    "etp",
    "ep",
    "cp",
    "tp",
    "pp",
)
_MANY: Final = 1000
_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "recompute": RECOMPUTES,
    "schedule": SCHEDULES,
    "context_parallel": CONTEXTS,
}


def nearest_infeasible(priced: Priced, scenario: Scenario, count: int) -> Ints:
    """Returns candidates that lack memory: those better than any that fits, or the closest.

    One a layout, so that the list shows different ways.
    """
    outside = np.flatnonzero(~priced.fits)
    if not len(outside):
        return outside
    if priced.fits.any():
        by = objective_value(priced, scenario)
        outside = outside[by[outside] < by[priced.fits].min()]
    else:
        by = priced.peak_bytes
    outside = outside[np.argsort(by[outside], kind="stable")]
    ids = layout_ids(priced.candidates)[outside]
    _, first = np.unique(ids, return_index=True)
    return outside[np.sort(first)][:count]


def describe(
    priced: Priced,
    index: int,
    step_time_s: float,
    scenario: Scenario,
    calibration: Calibration,
    *,
    grow: bool = False,
) -> InfeasiblePlan:
    """Returns candidate `index` as an infeasible plan with its violation and nearest fix.

    Args:
        grow: look for more GPUs that would hold it, where no other plan fits.
    """
    limit = scenario.cluster.node.gpu.hbm_bytes
    peak, stage = int(priced.peak_bytes[index]), int(priced.peak_stage[index])
    plan, missing = priced.candidates.plan(index), peak - limit
    classes, host = memory_of_stage(scenario, plan, calibration, stage)
    fix = _fix(priced, index) or (more_gpus(scenario, plan, calibration) if grow else "")
    if missing > 0:
        found = Violation(
            field="memory",
            value=show_bytes(peak),
            rule=f"a GPU of stage {stage} needs {show_bytes(missing)} more than it has "
            f"({largest_classes(classes)})",
            limit=show_bytes(limit),
            nearest_fix=fix,
        )
    else:
        most = scenario.cluster.node.host_bytes
        found = Violation(
            field="host_memory",
            value=show_bytes(host),
            rule=f"what is offloaded needs {show_bytes(host - most)} more host memory than a "
            "node has",
            limit=show_bytes(most),
            nearest_fix=fix,
        )
    return InfeasiblePlan(
        plan=plan,
        step_time_s=step_time_s,
        peak_memory_bytes=peak,
        missing_bytes=max(missing, 0),
        stage=stage,
        violations=(found,),
        memory_bytes=classes,
    )


def _fix(priced: Priced, index: int) -> str:
    """Returns the fitting plan that differs in the fewest axes, as text; "" if nothing fits."""
    c = priced.candidates
    fitting = np.flatnonzero(priced.fits)
    if not len(fitting):
        return ""
    differing = np.zeros(len(fitting), np.int64)
    for weight, name in enumerate(_FIX_AXES, 1):
        column = getattr(c, name)
        # How many axes differ counts most, then which ones.
        differing += np.where(column[fitting] != column[index], _MANY + weight, 0)
    least = fitting[differing == differing.min()]
    chosen = int(least[np.argmin(priced.step_time_s[least])])
    changes = [
        _change(c, n, chosen) for n in _FIX_AXES if getattr(c, n)[chosen] != getattr(c, n)[index]
    ]
    return f"{', '.join(changes)}: fits at {show_seconds(priced.step_time_s[chosen])} a step"


def _change(c: Candidates, name: str, index: int) -> str:
    value = int(getattr(c, name)[index])
    if name in _NAMES:
        return f"{name} {_NAMES[name][value]}"
    if name == "recompute_tags":
        listed = ",".join(c.tag_lists[value]) if value >= 0 else "as selective has it"
        return f"recompute_tags {listed}"
    if name == "recompute_layers":
        return f"recompute_layers {value}" if value >= 0 else "all layers recomputed"
    if name == "layout":
        layers = c.plan(index).layers_per_stage
        return "layers spread evenly" if layers is None else f"layers {_runs(layers)}"
    if name.endswith("offload") or name in {"fp8_activations", "fused_loss"}:
        return f"{name} {'on' if value else 'off'}"
    return f"{name} {value}"


def _runs(layers: tuple[int, ...]) -> str:
    """Returns 3,4,4,4,3 as '3+3x4+3'."""
    runs: list[list[int]] = []
    for n in layers:
        if runs and runs[-1][0] == n:
            runs[-1][1] += 1
        else:
            runs.append([n, 1])
    return "+".join(f"{count}x{n}" if count > 1 else str(n) for n, count in runs)
