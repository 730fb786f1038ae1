"""Number formats: what fp32 gradients cost, and how recipes compare."""

from __future__ import annotations

from typing import Any, Final

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.questions.answer import Answer, Replan
from flopwright.planner.questions.replan import AS_PLANNED, fastest, replan, with_workload
from flopwright.simulator.calibration.model import Calibration
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import Precision
from flopwright.units import show_bytes, show_percent, show_seconds

_FP32: Final = Precision(
    compute="fp32",
    weights="fp32",
    gradients="fp32",
    master_weights="none",
    optimizer_state="fp32",
)
_PURE: Final = Precision(gradients="bf16", master_weights="none", optimizer_state="bf16")
RECIPES: Final[dict[str, Precision]] = {
    "fp32": _FP32,
    "bf16, all sums and state fp32": Precision(),
    "bf16, gradients bf16": Precision(gradients="bf16"),
    "bf16, moments bf16": Precision(optimizer_state="bf16"),
    "pure bf16": _PURE,
    "fp8 blocks": Precision(gemm="fp8_block"),
    "mxfp8": Precision(gemm="mxfp8"),
}


def _in(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration, words: str, kept: Precision
) -> Replan:
    """Returns the plan priced in other formats; what the hardware lacks is its violation."""
    setting = with_workload(scenario, precision=kept)
    try:
        return replan(setting, plan, calibration, words)
    except InputError as error:
        return Replan(change=words, plan=plan, violations=error.violations)


def fp32_gradients(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Answer:
    """Returns what summing and reducing gradients in fp32 takes against the compute dtype."""
    own = scenario.workload.precision
    narrow = "bf16" if own.compute == "fp32" else own.compute
    found = tuple(
        _in(
            scenario,
            plan,
            calibration,
            f"gradients {dtype}",
            own.model_copy(update={"gradients": dtype}),
        )
        for dtype in ("fp32", narrow)
    )
    wide, short = found
    if wide.violations or short.violations:
        rule = (*wide.violations, *short.violations)[0].rule
        return Answer(
            question="fp32_gradients",
            text=f"It cannot be told: {rule}.",
            data={"added_bytes": None, "added_s": None},
            replans=found,
        )
    added_bytes = wide.peak_memory_bytes - short.peak_memory_bytes
    added_s = wide.priced_s - short.priced_s
    fits = "" if wide.fits else ", and does not fit"
    return Answer(
        question="fp32_gradients",
        text=f"Against {narrow}, fp32 gradients take {show_bytes(added_bytes)} more of the peak "
        f"and {show_seconds(max(added_s, 0.0))} ({show_percent(added_s / short.priced_s)}) more "
        f"of the step{fits}.",
        data={
            "added_bytes": added_bytes,
            "added_s": added_s,
            "as_planned": own.gradients,
            "narrow": narrow,
        },
        replans=found,
    )


def precision_recipe(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Answer:
    """Returns peak and step of each precision recipe; the quality of training is not priced."""
    found = [replan(scenario, plan, calibration, AS_PLANNED)]
    for words, precision in RECIPES.items():
        if precision != scenario.workload.precision:
            found.append(_in(scenario, plan, calibration, words, precision))
    best, base = fastest(found), found[0]
    rows: dict[str, Any] = {
        r.change: {
            "peak_bytes": r.peak_memory_bytes,
            "step_time_s": r.step_time_s,
            "fits": r.fits,
        }
        for r in found
        if not r.violations
    }
    refused = {r.change: r.violations[0].rule for r in found if r.violations}
    told = "; ".join(
        f"{r.change}: {show_bytes(r.peak_memory_bytes)}, {show_seconds(r.priced_s)}"
        for r in found
        if not r.violations
    )
    first = (
        "None fits"
        if best is None
        else f"{best.change.capitalize()} is the fastest that fits"
        + ("" if best is base or not base.step_time_s else f" ({_gain(best, base)})")
    )
    return Answer(
        question="precision_recipe",
        text=f"{first}. {told}. What a format does to the loss is not priced.",
        data={"recipe": best and best.change, "by_recipe": rows, "refused": refused},
        replans=tuple(found),
    )


def _gain(best: Replan, base: Replan) -> str:
    return f"{show_percent(1 - best.priced_s / base.priced_s)} shorter than as planned"
