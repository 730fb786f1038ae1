"""Figures of the calibration loop: what a launch's runs say of predictions, and the verdicts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flopwright.executor.launch.request import ROUNDS_FILE
from flopwright.executor.measure.fingerprint import processor_name
from flopwright.report.compare import ClassComparison, Comparison, compare, memory_comparisons
from flopwright.report.metrics import Measurement
from flopwright.report.probe import ProbeReport
from flopwright.simulator.calibration.fit_probe import fit_probe
from flopwright.simulator.calibration.fit_runs import fit_runs
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.calibration.repredict import memory_as_routed, predict_measurement

TWIN = "-again"


def compared(calibration: Calibration, runs: Sequence[Measurement]) -> dict[str, Comparison]:
    """Returns every run beside what the calibration predicts for it."""
    return {m.plan_name: compare(predict_measurement(calibration, m), m) for m in runs}


def step_error(comparison: Comparison) -> float:
    """Returns the signed error of the step time."""
    error = comparison.error("step_time_s")
    assert error is not None
    return error


def covered(comparisons: Mapping[str, Comparison], names: Sequence[str]) -> float:
    """Returns the share of runs inside their intervals."""
    return statistics.mean(float(bool(comparisons[n].metrics[0].in_interval)) for n in names)


def memory_errors(classes: Sequence[ClassComparison]) -> dict[str, float]:
    """Returns |predicted / measured - 1| by memory class of the fullest stage."""
    return {
        c.name: abs(c.predicted / c.measured - 1) if c.measured else float(c.predicted > 0)
        for c in classes
    }


def routed_memory(
    calibration: Calibration, measurement: Measurement
) -> tuple[ClassComparison, ...]:
    """Returns the memory classes, predicted from the rows that experts got in the run."""
    stages = memory_as_routed(calibration, measurement)
    return memory_comparisons(stages, measurement.metrics)


def report_of(
    probe: ProbeReport,
    runs: Sequence[Measurement],
    marked: frozenset[str],
    *,
    folder: Path,
    draws: int,
) -> dict[str, Any]:
    """Returns a world size's figures.

    Args:
        marked: names of the plans to learn from; folder: the launch's.
        draws: other draws of five plans to learn from.
    """
    plans = [m for m in runs if not m.plan_name.endswith(TWIN)]
    names = [m.plan_name for m in plans]
    base = fit_probe(probe)
    before = compared(base, plans)
    learnt = [m for m in plans if m.plan_name in marked]
    after = compared(fit_runs(base, learnt, predict_measurement), plans)
    held = [n for n in names if n not in marked]
    memory = {n: memory_errors(before[n].memory_classes) for n in names}
    routed = {m.plan_name: memory_errors(routed_memory(base, m)) for m in plans}
    floor = runs[0].noise_floor
    return {
        "probe_only_median_error": _median_error(before, names),
        "calibrated_median_error": _median_error(after, held),
        "interval80_coverage": covered(after, held),
        "probe_only_coverage": covered(before, names),
        "memory_max_error": _largest(memory, names),
        "memory_max_error_given_routing": _largest(routed, names),
        "memory_max_error_even": _largest(memory, [n for n in names if "ep" not in _kinds(n)]),
        "noise_floor": floor,
        "date": probe.created,
        "repeats": min(len(m.step_time_samples_s) for m in plans),
        "sentinel_spread": _sentinel_spread(folder),
        "n_plans": len(plans),
        "n_held_out": len(held),
        "learnt_from": sorted(m.plan_name for m in learnt),
        "draws": dict(_draws(base, plans, draws)),
        "by_model": {
            model: {
                "probe_only_median_error": _median_error(before, _of(model, names)),
                "calibrated_median_error": _median_error(after, _of(model, held)),
            }
            for model in dict.fromkeys(n.partition("-")[0] for n in names)
            if _of(model, held)
        },
        "plans": {
            m.plan_name: {
                "step_time_s": m.metrics.step_time_s,
                "spread": m.step_time_p90_s / m.step_time_p10_s - 1,
                "probe_only_error": step_error(before[m.plan_name]),
                "calibrated_error": step_error(after[m.plan_name]),
                "inside": after[m.plan_name].metrics[0].in_interval,
                "memory_error": max(memory[m.plan_name].values(), default=0.0),
                "memory_error_given_routing": max(routed[m.plan_name].values(), default=0.0),
                "expert_rows": max(m.expert_rows, default=1.0),
            }
            for m in plans
        },
    }


def _sentinel_spread(folder: Path) -> float:
    """Returns how much one block of products, timed each round, varied: slowest / quickest - 1."""
    lines = (folder / ROUNDS_FILE).read_text(encoding="utf-8").splitlines()
    seconds = [json.loads(line)["sentinel_s"] for line in lines]
    return max(seconds) / min(seconds) - 1


def _kinds(name: str) -> set[str]:
    """Returns the kinds of parallelism that a plan's name says: "k2-pp2-ep2-mb2" has pp and ep."""
    return {part.rstrip("0123456789") for part in name.split("-")}


def _largest(errors: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> float:
    return max((e for n in names for e in errors[n].values()), default=0.0)


def _of(model: str, names: Sequence[str]) -> list[str]:
    return [n for n in names if n.startswith(model)]


def _median_error(comparisons: Mapping[str, Comparison], names: Sequence[str]) -> float:
    return statistics.median(abs(step_error(comparisons[n])) for n in names)


def _draws(
    base: Calibration, plans: Sequence[Measurement], draws: int
) -> Iterator[tuple[str, float]]:
    """Yields what other draws of five plans give for the rest: median, worst, coverage."""
    if not draws:
        return
    generator = np.random.default_rng(0)
    errors, shares = [], []
    for _ in range(draws):
        chosen = set(generator.choice(len(plans), 5, replace=False).tolist())
        learnt = fit_runs(base, [plans[i] for i in sorted(chosen)], predict_measurement)
        held = [m for i, m in enumerate(plans) if i not in chosen]
        found = compared(learnt, held)
        errors.append(_median_error(found, list(found)))
        shares.append(covered(found, list(found)))
    yield "number", draws
    yield "median_error", statistics.median(errors)
    yield "p90_error", float(np.quantile(errors, 0.9))
    yield "coverage", statistics.mean(shares)


def verdicts(world: int, report: Mapping[str, Any]) -> list[str]:
    """Returns a line for each thing that was asked for: met or not, and the figures."""
    floor = report["noise_floor"] or 0.0
    bound = max(0.10, 2 * floor) if world == 2 else 0.20
    why = f"twice the noise floor of {floor:.1%}" if bound > 0.10 and world == 2 else "asked for"
    lines = [
        ("probe alone, median step error", report["probe_only_median_error"], 0.20, "asked for"),
        ("learnt from five, median error of the others", report["calibrated_median_error"],
         bound, why),
        ("tensor memory by class given the rows that experts got, largest error",
         report["memory_max_error_given_routing"], 0.01, "asked for"),
        ("the same before the run, with even routing", report["memory_max_error"], 0.01,
         "asked for"),
        ("the same without expert parallelism", report["memory_max_error_even"], 0.01,
         "asked for"),
    ]  # fmt: skip
    out = [
        f"{world} ranks: {'met' if value <= limit else 'NOT MET'}: {what} {value:.2%}, "
        f"at most {limit:.1%} ({reason})"
        for what, value, limit, reason in lines
    ]
    share = report["interval80_coverage"]
    word = "met" if 0.65 <= share <= 0.95 else "NOT MET"
    out.append(f"{world} ranks: {word}: 80 % intervals hold {share:.0%} of {report['n_held_out']}")
    return out


def summary(found: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns the last line: the figures of the first world size, and all by world size."""
    first = next(iter(found.values()))
    keys = (
        "probe_only_median_error", "calibrated_median_error", "interval80_coverage",
        "memory_max_error", "noise_floor", "n_plans",
    )  # fmt: skip
    return {
        **{key: first[key] for key in keys},
        "by_world_size": {str(w): report for w, report in found.items()},
        "machine": processor_name(),
        "date": first["date"],
        "repeats": first["repeats"],
        "spread": statistics.median(p["spread"] for p in first["plans"].values()),
    }
