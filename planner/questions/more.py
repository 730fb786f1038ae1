"""What the next node, the next GiB or a faster link would buy: the layout planned again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.questions.answer import Replan
from flopwright.planner.questions.replan import fastest, replans, with_gpus, with_hbm
from flopwright.planner.space import legal_candidates
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.base import Spec
from flopwright.spec.scenario import Scenario
from flopwright.units import GIB, plural, show_percent

Kind = Literal["gpu", "memory"]
# GPU memory is tried so much larger, in GiB.
MORE_GIB: Final = (1, 8, 16, 32)
# Replayed at a time.
_BATCH: Final = 16
# Less than this share of a step is nothing.
_NOTHING: Final = 1e-6


class Purchase(Spec):
    """One change of the cluster.

    Attributes:
        step_time_s: of the best plan with it: of the same layout (tp, pp, cp, ep), or for
            memory also one choice away; None where nothing of these fits.
        gain: share of the step that goes; None likewise, or where nothing fits without it.
    """

    kind: Kind
    what: str
    text: str
    plan: ParallelPlan | None = None
    step_time_s: float | None = None
    gain: float | None = None


def purchases(
    scenario: Scenario,
    plan: ParallelPlan,
    calibration: Calibration,
    near: Sequence[ParallelPlan] = (),
) -> tuple[Purchase, ...]:
    """Returns what more GPUs and more memory would buy, the rest of the plan chosen anew.

    GPUs are doubled: batches and layouts divide by few other numbers. The global batch
    stays. Memory may also make room for one of the plans `near`. What a faster link buys
    stands in planner.sensitivity, for the plan as it is.
    """
    layout = best_of_layout(scenario, plan, calibration)
    gpus, hbm = scenario.cluster.num_gpus, scenario.cluster.node.gpu.hbm_bytes
    double = best_of_layout(with_gpus(scenario, 2 * gpus), plan, calibration)
    found = [_bought("gpu", plural(2 * gpus, "GPU"), double, layout)]

    def beside(setting: Scenario, best: Replan | None) -> Replan | None:
        priced = replans(setting, [("one choice away", p) for p in near], calibration)
        return fastest([*([best] if best else []), *priced])

    base = beside(scenario, layout)
    for gib in MORE_GIB:
        larger = with_hbm(scenario, hbm + gib * GIB)
        best = beside(larger, best_of_layout(larger, plan, calibration))
        found.append(_bought("memory", f"{gib} GiB a GPU", best, base))
    return tuple(found)


def best_of_layout(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration
) -> Replan | None:
    """Returns the fastest usable plan with the same tp, pp, cp and ep; None without any.

    All are priced by the closed form, which never exceeds the replay; the best of them are
    replayed until none of the others can be faster.
    """
    fixed = {name: getattr(plan, name) for name in ("tp", "pp", "cp", "ep")}
    try:
        candidates = legal_candidates(scenario, fixed)
    except InputError:
        return None
    found = evaluate(scenario, candidates, calibration)
    node = scenario.cluster.node
    fits = (found.peak_bytes <= node.gpu.hbm_bytes) & (found.host_bytes <= node.host_bytes)
    order = [int(i) for i in found.step_time_s.argsort(kind="stable") if fits[i]]
    best: Replan | None = None
    for start in range(0, len(order), _BATCH):
        part = order[start : start + _BATCH]
        if best is not None and found.step_time_s[part[0]] >= best.priced_s:
            break
        priced = replans(
            scenario, [("same layout", candidates.plan(i)) for i in part], calibration
        )
        best = fastest([*([best] if best else []), *priced])
    return best


def _bought(kind: Kind, what: str, best: Replan | None, base: Replan | None) -> Purchase:
    if best is None:
        return Purchase(kind=kind, what=what, text="still nothing of this layout fits")
    gain = None if base is None else 1 - best.priced_s / base.priced_s
    if gain is None:
        text = f"{best.plan.label()} then fits"
    elif abs(gain) < _NOTHING:
        text = "nothing: the same step"
    else:
        how = "off the step" if gain > 0 else "more a step"
        text = f"{show_percent(abs(gain))} {how}, with {best.plan.label()}"
    return Purchase(
        kind=kind, what=what, text=text, plan=best.plan, step_time_s=best.priced_s, gain=gain
    )
