"""A grid of scenarios, planned point by point, on as many processes as asked: a row a point."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from pydantic import Field

from flopwright.errors import InputError, Violation
from flopwright.planner.result import SearchResult
from flopwright.planner.search import search
from flopwright.planner.whole_run import whole_run
from flopwright.report.metrics import Prediction
from flopwright.simulator.accuracy.named_stacks import scenario_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.spec.base import Spec
from flopwright.spec.scenario import Scenario
from flopwright.spec.sweep import SweepPoint

Backend = Literal["joblib", "ray"]
_HINTS: Final = {
    "joblib": "pip install joblib, or use --jobs 1",
    "ray": "pip install ray, or leave --backend out",
    "pyarrow": "pip install pyarrow",
}


class SweepRow(Spec):
    """What planning one point gave.

    Attributes:
        index: its place in the grid; values: the swept fields' values.
        verdict: of the search; "no_legal_plan" where every plan breaks a rule.
        reason: why no plan is given, the first of the rules or what the nearest plan lacks.
        plan: the best plan's label; the numbers after it are that plan's.
        missing_bytes: what the plan nearest to fitting lacks on a GPU; 0 where one fits.
        candidates, fit: plans priced, and those that memory holds.
        prediction, phase, gpu and the hashes: of the best plan, for the shared table
            (sweep_table.py); the row as JSON leaves them out.
    """

    index: int
    values: dict[str, Any]
    verdict: Literal["fits", "tight", "does_not_fit", "no_legal_plan"]
    reason: str = ""
    gpus: int | None = None
    plan: str | None = None
    step_time_s: float | None = None
    step_time_low_s: float | None = None
    step_time_high_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    days: float | None = None
    gpu_hours: float | None = None
    usd: float | None = None
    missing_bytes: int = 0
    candidates: int = 0
    fit: int = 0
    prediction: Prediction | None = Field(default=None, exclude=True)
    phase: str = Field(default="", exclude=True)
    gpu: str = Field(default="", exclude=True)
    model_hash: str = Field(default="", exclude=True)
    scenario_hash: str = Field(default="", exclude=True)


def plan_point(point: SweepPoint, calibration: Calibration | None = None) -> SweepRow:
    """Returns the row of one point: its best plan, or why it has none."""
    calibration = calibration or scenario_calibration(point.scenario)
    try:
        result = search(point.scenario, calibration, top_k=1)
    except InputError as error:
        return SweepRow(
            index=point.index,
            values=point.values,
            verdict="no_legal_plan",
            reason="; ".join(str(v) for v in error.violations),
        )
    return SweepRow(
        index=point.index,
        values=point.values,
        verdict=result.verdict,
        candidates=result.candidates,
        fit=result.fit,
        **_best(result, point.scenario),
    )


def _best(result: SearchResult, scenario: Scenario) -> dict[str, Any]:
    best = result.best
    if best is None:
        if not result.infeasible:
            return {}
        nearest = result.infeasible[0]
        return {
            "reason": f"{nearest.plan.label()}: {nearest.violations[0]}",
            "missing_bytes": nearest.missing_bytes,
        }
    metrics, interval = best.prediction.metrics, best.prediction.step_time_interval
    run, gpu = whole_run(scenario, best.prediction), scenario.cluster.node.gpu
    return {
        "gpus": best.plan.world_size,
        "prediction": best.prediction,
        "phase": scenario.workload.kind,
        "gpu": "cpu" if gpu.kind == "cpu" else gpu.name,
        "model_hash": scenario.model.content_hash(),
        "scenario_hash": scenario.content_hash(),
        "plan": best.plan.label(),
        "step_time_s": metrics.step_time_s,
        "step_time_low_s": interval.low,
        "step_time_high_s": interval.high,
        "tokens_per_s_per_gpu": metrics.tokens_per_s_per_gpu,
        "mfu": metrics.mfu,
        "peak_memory_bytes": metrics.peak_memory_bytes,
        "days": run.days,
        "gpu_hours": run.gpu_hours,
        "usd": run.usd,
    }


def check_installed(package: str) -> None:
    """Refuses what needs a package that is not installed.

    Raises:
        InputError: with the command that installs it.
    """
    if importlib.util.find_spec(package) is None:
        raise InputError(
            Violation(
                value=package,
                rule="this needs a package that is not installed",
                nearest_fix=_HINTS[package],
            )
        )


def on_stack(point: SweepPoint, stack: str) -> SweepPoint:
    """Returns the point on another software stack.

    Raises:
        InputError: no stack of that name.
    """
    scenario = point.scenario.model_copy(update={"stack": stack})
    scenario_calibration(scenario)
    return replace(point, scenario=scenario)


def run_sweep(
    points: Sequence[SweepPoint],
    calibration: Calibration | None = None,
    *,
    jobs: int = 1,
    backend: Backend = "joblib",
) -> Iterator[SweepRow]:
    """Yields rows as points are done, in any order; closing it early ends what still runs.

    Args:
        calibration: None takes what each point's scenario says (its stack).
        jobs: processes; one plans here, without another process, unless Ray is asked for.

    Raises:
        InputError: the backend is not installed.
    """
    if backend == "joblib" and jobs == 1:
        return (plan_point(point, calibration) for point in points)
    check_installed(backend)
    return (_on_ray if backend == "ray" else _on_joblib)(points, calibration, jobs)


def _on_joblib(
    points: Sequence[SweepPoint], calibration: Calibration | None, jobs: int
) -> Iterator[SweepRow]:
    joblib = importlib.import_module("joblib")
    work = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")
    yield from work(joblib.delayed(plan_point)(point, calibration) for point in points)


def _on_ray(
    points: Sequence[SweepPoint], calibration: Calibration | None, jobs: int
) -> Iterator[SweepRow]:
    """Yields rows from a Ray that runs already, or from one started here and ended after."""
    ray = importlib.import_module("ray")
    ours = not ray.is_initialized()
    if ours:
        ray.init(num_cpus=jobs, include_dashboard=False, log_to_driver=False)
    try:
        remote = ray.remote(plan_point)
        waiting = [remote.remote(point, calibration) for point in points]
        while waiting:
            done, waiting = ray.wait(waiting)
            yield from ray.get(done)
    finally:
        if ours:
            ray.shutdown()


def as_columns(rows: Iterable[SweepRow]) -> dict[str, list[Any]]:
    """Returns the table by column, in the order of the grid: swept fields, then the results.

    A value that is a list or a record stands as JSON text, and so does a field of which some
    values are text and some are not.
    """
    ordered = sorted(rows, key=lambda row: row.index)
    fields = dict.fromkeys(name for row in ordered for name in row.values)
    out = {name: _column([row.values.get(name) for row in ordered]) for name in fields}
    known = SweepRow.model_fields
    results = [n for n, f in known.items() if n not in {"index", "values"} and not f.exclude]
    return out | {name: [getattr(row, name) for row in ordered] for name in results}


def _column(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values}
    if kinds <= {str} or kinds <= {bool} or kinds <= {int, float}:
        return values
    return [json.dumps(value) for value in values]
