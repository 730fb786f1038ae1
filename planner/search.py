"""The search: every legal plan is priced, none is skipped; the best are replayed in full."""

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
from flopwright.planner.result import InfeasiblePlan, RankedPlan, SearchResult, TradeOff, Verdict
from flopwright.planner.space import Fixed, legal_candidates
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.simulator.training.predict import predict
from flopwright.spec.scenario import Scenario

# Candidates priced at once: those of one pipeline share most of the work, so few are cut apart.
CHUNK: Final = 65536
_MAX_FRONT: Final = 50
Progress = Callable[[int, int], None]


def search(
    scenario: Scenario,
    calibration: Calibration | None = None,
    top_k: int = 10,
    *,
    fixed: Fixed | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Returns the best plans of a scenario, and the plans that lack memory.

    Args:
        scenario: model, cluster, workload and the bounds of the search.
        calibration: what the simulator prices with; None takes the GPU's public prior.
        top_k: layouts to return, the best plan of each.
        fixed: fields that every plan must have (planner.space.FIXABLE).
        progress: called with (priced, total) after each chunk.

    Raises:
        InputError: no plan is legal, with every rule that stands against the nearest one.
    """
    candidates = legal_candidates(scenario, fixed)
    calibration = calibration or default_calibration(scenario.cluster.node.gpu)
    priced = price(scenario, candidates, calibration, progress)
    ids = layout_ids(candidates)
    found = finalists(priced, scenario, top_k, calibration)
    replayed = select(priced, found.index, found.step_time_s)
    winners = best_of_each_layout(order(replayed, scenario), ids[found.index])[:top_k]
    outside = nearest_infeasible(priced, scenario, top_k)
    best = objective_value(replayed, scenario)[winners[0]] if len(winners) else None
    return SearchResult(
        verdict=_verdict(priced, scenario),
        candidates=len(candidates),
        fit=int(priced.fits.sum()),
        replayed=len(found.index),
        proved=found.proved,
        headroom_asked=scenario.search.memory_headroom,
        ranked=_ranked(priced, scenario, found.index[winners], ids, calibration),
        infeasible=_infeasible(priced, scenario, outside, best, calibration),
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
    return tuple(describe(priced, int(index[r]), float(exact[r]), scenario) for r in rows)


def price(
    scenario: Scenario,
    candidates: Candidates,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> Priced:
    """Returns the candidates with step time, peak memory and whether they fit."""
    times, peaks, stages, fits = [], [], [], []
    node = scenario.cluster.node
    for start in range(0, len(candidates), CHUNK):
        part = candidates.take(np.arange(start, min(start + CHUNK, len(candidates))))
        found = evaluate(scenario, part, calibration)
        times.append(found.step_time_s)
        peaks.append(found.peak_bytes)
        stages.append(np.argmax(sum(found.memory_bytes.values()), axis=0))
        fits.append(
            (found.peak_bytes <= node.gpu.hbm_bytes) & (found.host_bytes <= node.host_bytes)
        )
        if progress is not None:
            progress(start + len(part), len(candidates))
    return Priced(
        candidates=candidates,
        step_time_s=np.concatenate(times),
        peak_bytes=np.concatenate(peaks),
        peak_stage=np.concatenate(stages),
        fits=np.concatenate(fits),
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
