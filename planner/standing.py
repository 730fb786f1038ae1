"""Where a given plan stands: its rank among all that fit, and why each better one is better.

Layouts are ranked by their best plan. A layout is better than the given plan when one of its
plans, replayed, is; the bound says where to look, so that only a few of each are replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.planner.exact import replayed_step_times
from flopwright.planner.explain import CLASS_WORDS
from flopwright.planner.ranking import (
    Bools,
    Priced,
    comfortable,
    headroom,
    layout_ids,
    objective_value,
    select,
)
from flopwright.planner.search import price
from flopwright.planner.space import legal_candidates
from flopwright.report.metrics import Prediction
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.engine.simulate import event_step_seconds
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.simulator.training.predict import predict
from flopwright.spec.base import Spec
from flopwright.spec.scenario import Scenario
from flopwright.units import show_bytes, show_seconds

# Rounds in which one plan of each open layout is replayed; in the last one all that are open.
_MOST_TRIES: Final = 5
_MOST_REPLAYS: Final = 4096
# Seconds below this share of the step are no reason.
_NOTICEABLE: Final = 0.002
_REASONS: Final = 3
_AXES: Final = (
    "tp", "pp", "vpp", "cp", "ep", "etp", "dp_replicate", "micro_batch_size", "zero_stage",
    "schedule", "layers_per_stage", "recompute", "recompute_tags", "recompute_layers",
    "fp8_activations", "activation_offload", "optimizer_offload", "gradient_offload",
    "parameter_offload", "fused_loss",
)  # fmt: skip


class BetterPlan(Spec):
    """The plan of a layout that is ranked before the given one.

    Attributes:
        gain: share of the given plan's objective that it saves.
        time_s: seconds that it saves by time class (negative: that it adds).
        differs: axes on which it differs, "name here instead of there".
        reason: all of it in words.
    """

    plan: ParallelPlan
    step_time_s: float
    headroom: float
    gain: float
    time_s: dict[str, float]
    differs: tuple[str, ...]
    reason: str


class Standing(Spec):
    """Where a plan stands.

    Attributes:
        fits: memory holds it; missing_bytes: what lacks on a GPU of the fullest stage.
        refined_step_time_s: its step by the event engine.
        rank: 1 + layouts with a better plan, of `layouts` that have a plan that fits.
        plans_before: plans that fit and whose bound is below its step, of `plans` that fit.
        behind: how much more it takes than the best plan found, as a share of that.
        proved: every layout was settled.
    """

    name: str
    plan: ParallelPlan
    prediction: Prediction
    refined_step_time_s: float | None
    fits: bool
    missing_bytes: int
    headroom: float
    rank: int
    layouts: int
    plans_before: int
    plans: int
    behind: float
    proved: bool
    better: tuple[BetterPlan, ...]

    @property
    def top_share(self) -> float:
        """The share of all plans that fit that may be better: 0.05 is the top 5 %."""
        return self.plans_before / max(1, self.plans)


def standing(
    scenario: Scenario,
    plan: ParallelPlan,
    calibration: Calibration,
    *,
    name: str = "",
    priced: Priced | None = None,
    refine: bool = True,
) -> Standing:
    """Returns where a plan stands among all legal plans of a scenario.

    Args:
        priced: all legal candidates, where they were priced before.
        refine: send the plan through the event engine too.

    Raises:
        InputError: every rule of shape that the plan breaks.
    """
    broken = plan_violations(plan, scenario)
    if broken:
        raise InputError(broken)
    priced = priced or price(scenario, legal_candidates(scenario), calibration)
    one = Candidates.from_plans((plan,))
    exact = replayed_step_times(scenario, one, calibration)
    mine = price(scenario, one, calibration)
    mine = select(mine, np.zeros(1, np.int64), exact)
    value = float(objective_value(mine, scenario)[0])
    pool = _pool(priced, mine, scenario)
    found, proved = _better_layouts(scenario, priced, pool, value, calibration)
    plans = list(found)
    prediction, _ = predict(
        scenario, plan, calibration, name=name or plan.label(), whole_trace=False
    )
    best = min((v for v, _ in found.values()), default=value)
    ids = layout_ids(priced.candidates)
    ordered = sorted(plans, key=lambda i: (found[i][0], i))
    missing = int(mine.peak_bytes[0]) - scenario.cluster.node.gpu.hbm_bytes
    return Standing(
        name=name or plan.label(),
        plan=plan,
        prediction=prediction,
        refined_step_time_s=event_step_seconds(scenario, plan, calibration)[0] if refine else None,
        fits=bool(mine.fits[0]),
        missing_bytes=max(missing, 0),
        headroom=float(headroom(mine, scenario)[0]),
        rank=1 + len(found),
        layouts=len(np.unique(ids[pool])),
        plans_before=int((objective_value(priced, scenario)[pool] < value).sum()),
        plans=int(pool.sum()),
        behind=value / best - 1,
        proved=proved,
        better=_reasons(
            scenario,
            calibration,
            priced,
            plan,
            value,
            float(exact[0]),
            [(i, *found[i]) for i in ordered],
        ),
    )


def _pool(priced: Priced, mine: Priced, scenario: Scenario) -> Bools:
    """Returns the candidates it is compared with: those that leave the headroom asked for.

    A plan that itself leaves less is compared with all that fit.
    """
    if bool(comfortable(mine, scenario)[0]):
        return comfortable(priced, scenario)
    return priced.fits


def _better_layouts(
    scenario: Scenario, priced: Priced, pool: Bools, value: float, calibration: Calibration
) -> tuple[dict[int, tuple[float, float]], bool]:
    """Returns a better candidate of each layout that has one: (its objective, its step).

    And whether every layout is settled.
    """
    bound = objective_value(priced, scenario)
    left = np.flatnonzero(pool & (bound < value))
    left = left[np.argsort(bound[left], kind="stable")]
    ids = layout_ids(priced.candidates)
    found: dict[int, tuple[float, float]] = {}
    for attempt in range(_MOST_TRIES):
        if not len(left):
            return found, True
        _, first = np.unique(ids[left], return_index=True)
        chosen = left[np.sort(first)]
        if attempt == _MOST_TRIES - 1:
            chosen = left[:_MOST_REPLAYS]  # what is still open is replayed as a whole
        exact = replayed_step_times(scenario, priced.candidates.take(chosen), calibration)
        values = objective_value(select(priced, chosen, exact), scenario)
        won = np.flatnonzero(values < value)
        _, best = np.unique(ids[chosen[won]], return_index=True)
        won = won[best]
        found |= {
            int(i): (float(v), float(s))
            for i, v, s in zip(chosen[won], values[won], exact[won], strict=True)
        }
        settled = np.isin(ids[left], ids[chosen[won]]) | np.isin(left, chosen)
        left = left[~settled]
    return found, not len(left)


def _reasons(
    scenario: Scenario,
    calibration: Calibration,
    priced: Priced,
    plan: ParallelPlan,
    value: float,
    step_s: float,
    better: list[tuple[int, float, float]],
) -> tuple[BetterPlan, ...]:
    if not better:
        return ()
    index = np.array([i for i, _, _ in better])
    plans = [priced.candidates.plan(i) for i, _, _ in better]
    found = evaluate(scenario, Candidates.from_plans([plan, *plans]), calibration)
    # The evaluation is of bounds: what a replay takes longer, a stage waits.
    exact = np.array([step_s, *(s for _, _, s in better)])
    times = found.time_s | {"idle": found.time_s["idle"] + exact - found.step_time_s}
    # Pairs of a forward and a backward hide exchanges: what all classes are too long by.
    hidden = np.maximum(np.asarray(sum(times.values())) - exact, 0.0)
    if "ep_comm" in times:
        times["ep_comm"] = times["ep_comm"] - np.minimum(hidden, times["ep_comm"])
    free = headroom(select(priced, index), scenario)
    out = []
    for row, (_, objective, seconds) in enumerate(better):
        saved = {k: float(v[0] - v[row + 1]) for k, v in times.items()}
        differs = _differences(plan, plans[row])
        out.append(
            BetterPlan(
                plan=plans[row],
                step_time_s=seconds,
                headroom=float(free[row]),
                gain=1 - objective / value,
                time_s={k: v for k, v in saved.items() if v},
                differs=differs,
                reason=_words(saved, differs, seconds),
            )
        )
    return tuple(out)


def _words(saved: Mapping[str, float], differs: tuple[str, ...], step_s: float) -> str:
    """Returns the reason in words: what it saves most on, what that costs, how it differs."""
    least = _NOTICEABLE * step_s
    ranked = sorted(saved.items(), key=lambda kv: (-kv[1], kv[0]))
    less = [f"{CLASS_WORDS.get(k, k)} -{show_seconds(v)}" for k, v in ranked if v > least]
    more = [f"{CLASS_WORDS.get(k, k)} +{show_seconds(-v)}" for k, v in ranked[::-1] if v < -least]
    parts = [", ".join(less[:_REASONS]) or "a little of everything"]
    if more:
        parts.append(f"for {', '.join(more[:_REASONS])}")
    return f"{' '.join(parts)} ({', '.join(differs)})"


def _differences(mine: ParallelPlan, other: ParallelPlan) -> tuple[str, ...]:
    out = []
    for name in _AXES:
        here, there = getattr(other, name), getattr(mine, name)
        if here == there:
            continue
        if name == "layers_per_stage":
            out.append("layers split otherwise")
        elif isinstance(here, bool):
            out.append(f"{name} {'on' if here else 'off'}")
        elif name in ("recompute_tags", "recompute_layers"):
            out.append(f"{name} {_listed(here)}")
        else:
            out.append(f"{name} {here} instead of {there}")
    return tuple(out)


def _listed(value: object) -> str:
    if value is None or value == ():
        return "as its policy has it"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def lack_text(found: Standing) -> str:
    """Returns what a plan that does not fit lacks, "" where it fits."""
    if found.fits:
        return ""
    if not found.missing_bytes:
        return "does not fit: what it keeps in host memory exceeds the node's"
    stages = found.prediction.metrics.memory_bytes
    stage = max(range(len(stages)), key=lambda s: sum(stages[s].values()))
    cls = max(stages[stage], key=lambda c: stages[stage][c])
    return (
        f"does not fit: a GPU of stage {stage} lacks {show_bytes(found.missing_bytes)} "
        f"(most is {cls.replace('_', ' ')})"
    )
