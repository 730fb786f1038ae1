"""A search over formats of matrix products: one search a format, their results as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.planner.pareto import pareto_front
from flopwright.planner.ranking import plan_value
from flopwright.planner.result import RankedPlan, SearchResult, TradeOff
from flopwright.simulator.operators.variants import PEAK_OF
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import GemmRecipe

Variants = dict[GemmRecipe | None, Scenario]
_PEAK: Final = {"fp8_tensor": "fp8", **PEAK_OF}
_VERDICTS: Final = ("fits", "tight", "does_not_fit")


def recipe_variants(scenario: Scenario) -> Variants:
    """Returns the scenario with each format that its search tries, by format.

    Formats that the processor has no peak for are left out. None stands for the scenario as
    it is.

    Raises:
        InputError: the processor has none of the formats.
    """
    asked = tuple(dict.fromkeys(scenario.search.gemm))
    if not asked:
        return {None: scenario}
    peaks = scenario.cluster.node.gpu.peak_flops_per_s
    known = [g for g in asked if g == "same" or _PEAK[g] in peaks]
    if not known:
        raise InputError(
            Violation(
                field="search.gemm",
                value=", ".join(asked),
                rule=f"{scenario.cluster.node.gpu.name} has none of these formats",
                nearest_fix="use same",
            )
        )
    return {gemm: with_gemm(scenario, gemm) for gemm in known}


def with_gemm(scenario: Scenario, gemm: GemmRecipe | None) -> Scenario:
    """Returns the scenario with its layers' matrix products in a format."""
    if gemm is None:
        return scenario
    precision = scenario.workload.precision.model_copy(update={"gemm": gemm})
    workload = scenario.workload.model_copy(update={"precision": precision})
    return scenario.model_copy(update={"workload": workload})


def merged(
    results: Sequence[tuple[tuple[GemmRecipe | None, Scenario], SearchResult]], top_k: int
) -> SearchResult:
    """Returns the results of several formats as one; each is exact, so the whole is."""
    if len(results) == 1:
        return results[0][1]
    scenario = results[0][0][1]
    ranked = [
        plan.model_copy(update={"gemm": gemm})
        for (gemm, _), result in results
        for plan in result.ranked
    ]
    asked = scenario.search.memory_headroom

    def key(plan: RankedPlan) -> tuple[bool, float]:
        return plan.headroom < asked, plan_value(scenario, plan)

    best = sorted(ranked, key=key)[:top_k]
    every = [result for _, result in results]
    value = None if not best else plan_value(scenario, best[0])
    lacking = sorted(
        (p for r in every for p in r.infeasible),
        key=lambda p: p.step_time_s if value is not None else float(p.missing_bytes),
    )
    return SearchResult(
        verdict=min((r.verdict for r in every), key=_VERDICTS.index),
        candidates=sum(r.candidates for r in every),
        fit=sum(r.fit for r in every),
        replayed=sum(r.replayed for r in every),
        proved=all(r.proved for r in every),
        sampled_of=sum(r.sampled_of for r in every),
        headroom_asked=asked,
        ranked=tuple(p.model_copy(update={"rank": i}) for i, p in enumerate(best, 1)),
        infeasible=tuple(lacking[:top_k]),
        front=_front([t for r in every for t in r.front]),
    )


def _front(points: Sequence[TradeOff]) -> tuple[TradeOff, ...]:
    if not points:
        return ()
    steps = np.array([p.step_time_s for p in points])
    free = np.array([p.headroom for p in points])
    gpus = np.array([p.gpus for p in points])
    return tuple(points[int(i)] for i in pareto_front(steps, -free, steps * gpus))
