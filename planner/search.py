"""The search: every legal plan is priced, none is skipped; the best are replayed in full.

A bound on every candidate's step first (simulator/training/bounds.py); then best-first
branch and bound on exact times (exact.py); then, where asked, the event engine (refine.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from flopwright.planner.exact import finalists, replayed_step_times
from flopwright.planner.nearest import describe, nearest_infeasible
from flopwright.planner.pareto import pareto_front
from flopwright.planner.ranking import (
    Ints,
    Priced,
    best_of_each_layout,
    comfortable,
    headroom,
    layout_ids,
    objective_value,
    order,
    select,
)
from flopwright.planner.recipes import merged, recipe_variants
from flopwright.planner.refine import refined
from flopwright.planner.result import InfeasiblePlan, RankedPlan, SearchResult, TradeOff, Verdict
from flopwright.planner.space import MAX_PRICED, Fixed, legal_candidates, sampled_of
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.bounds import Progress as Progress
from flopwright.simulator.training.bounds import bounds
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.predict import predict
from flopwright.spec.scenario import Scenario

_MAX_FRONT: Final = 50
# Layouts that lack memory and are replayed: the first by bound may not be better than the best.
_LEAST_OUTSIDE: Final = 8
_TOLD_MORE: Final = 3
CalibrationOf = Callable[[Scenario], Calibration]


def search(
    scenario: Scenario,
    calibration: Calibration | CalibrationOf | None = None,
    top_k: int = 10,
    *,
    fixed: Fixed | None = None,
    progress: Progress | None = None,
    refine: bool = False,
) -> SearchResult:
    """Returns the best plans of a scenario, and the plans that lack memory.

    Args:
        scenario: model, cluster, workload and the bounds of the search.
        calibration: what the simulator prices with, or what it is for a scenario (formats
            of matrix products have their own); None takes the GPU's public prior.
        top_k: layouts to return, the best plan of each.
        fixed: fields that every plan must have (planner.space.FIXABLE).
        progress: called with (priced, total) now and then.
        refine: send the best through the event engine, and rank them by what it says.

    Raises:
        InputError: no plan is legal, with every rule that stands against the nearest one.
    """

    def calibration_of(variant: Scenario) -> Calibration:
        if calibration is None:
            return default_calibration(variant.cluster.node.gpu)
        return calibration if isinstance(calibration, Calibration) else calibration(variant)

    variants = recipe_variants(scenario)
    results = [
        _search(variant, calibration_of(variant), top_k, fixed, progress)
        for variant in variants.values()
    ]
    result = merged(list(zip(variants.items(), results, strict=True)), top_k)
    return refined(result, variants, calibration_of) if refine else result


def _search(
    scenario: Scenario,
    calibration: Calibration,
    top_k: int,
    fixed: Fixed | None,
    progress: Progress | None,
) -> SearchResult:
    """Returns the outcome for one format of matrix products, by the replay."""
    candidates = legal_candidates(scenario, fixed)
    priced = price(scenario, candidates, calibration, progress)
    ids = layout_ids(candidates)
    found = finalists(priced, scenario, top_k, calibration)
    replayed = select(priced, found.index, found.step_time_s)
    winners = best_of_each_layout(order(replayed, scenario), ids[found.index])[:top_k]
    outside = nearest_infeasible(priced, scenario, max(top_k, _LEAST_OUTSIDE))
    best = objective_value(replayed, scenario)[winners[0]] if len(winners) else None
    return SearchResult(
        verdict=_verdict(priced, scenario),
        candidates=len(candidates),
        fit=int(priced.fits.sum()),
        replayed=len(found.index),
        proved=found.proved,
        sampled_of=sampled_of(scenario, fixed) if len(candidates) > MAX_PRICED // 8 else 0,
        headroom_asked=scenario.search.memory_headroom,
        ranked=_ranked(priced, scenario, found.index[winners], ids, calibration),
        infeasible=_infeasible(priced, scenario, outside, best, calibration)[:top_k],
        front=_front(priced, scenario),
    )


def _infeasible(
    priced: Priced,
    scenario: Scenario,
    index: Ints,
    best: float | None,
    calibration: Calibration,
) -> tuple[InfeasiblePlan, ...]:
    """Returns the plans that lack memory, replayed; only better ones where something fits."""
    if not len(index):
        return ()
    exact = replayed_step_times(scenario, priced.candidates.take(index), calibration)
    value = objective_value(select(priced, index, exact), scenario)
    rows = list(range(len(index)))
    if best is not None:
        rows = sorted((r for r in rows if value[r] < best), key=lambda r: (value[r], index[r]))
    # Where nothing fits, what more GPUs would hold is told of the nearest.
    grow = set(rows[:_TOLD_MORE]) if best is None else set()
    return tuple(
        describe(priced, int(index[r]), float(exact[r]), scenario, calibration, grow=r in grow)
        for r in rows
    )


def price(
    scenario: Scenario,
    candidates: Candidates,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> Priced:
    """Returns the candidates with step time, peak memory and whether they fit."""
    found = bounds(scenario, candidates, calibration, progress)
    node = scenario.cluster.node
    return Priced(
        candidates=candidates,
        step_time_s=found.step_time_s,
        peak_bytes=found.peak_bytes,
        peak_stage=found.peak_stage,
        fits=(found.peak_bytes <= node.gpu.hbm_bytes) & (found.host_bytes <= node.host_bytes),
    )


def _verdict(priced: Priced, scenario: Scenario) -> Verdict:
    if comfortable(priced, scenario).any():
        return "fits"
    return "tight" if priced.fits.any() else "does_not_fit"


def _ranked(
    priced: Priced,
    scenario: Scenario,
    winners: Ints,
    ids: Ints,
    calibration: Calibration,
) -> tuple[RankedPlan, ...]:
    variants = np.bincount(ids[priced.fits], minlength=int(ids.max()) + 1)
    free = headroom(priced, scenario)
    out = []
    for rank, index in enumerate(winners, 1):
        plan = priced.candidates.plan(int(index))
        prediction, _ = predict(scenario, plan, calibration, name=plan.label(), whole_trace=False)
        out.append(
            RankedPlan(
                rank=rank,
                plan=plan,
                prediction=prediction,
                headroom=float(free[index]),
                variants=int(variants[ids[index]]),
            )
        )
    return tuple(out)


def _front(priced: Priced, scenario: Scenario) -> tuple[TradeOff, ...]:
    fitting = np.flatnonzero(priced.fits)
    if not len(fitting):
        return ()
    free = headroom(priced, scenario)
    cost = priced.step_time_s * priced.candidates.world_size
    front = fitting[pareto_front(priced.step_time_s[fitting], -free[fitting], cost[fitting])]
    return tuple(
        TradeOff(
            plan=priced.candidates.plan(int(i)),
            step_time_s=float(priced.step_time_s[i]),
            headroom=float(free[i]),
            gpus=int(priced.candidates.world_size[i]),
        )
        for i in front[:_MAX_FRONT]
    )
