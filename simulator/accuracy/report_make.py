"""From a file of measured runs to the accuracy report, with the committed stacks or by folds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.ops import Array
from flopwright.simulator.accuracy.baselines import (
    CONSTANT_MFU,
    FLAT_GEMM,
    constant_mfu_step_s,
    held_out_mfu_step_s,
    mfu_key,
    with_flat_products,
)
from flopwright.simulator.accuracy.crossval import HeldOut, held_out
from flopwright.simulator.accuracy.features import simulated_step_s
from flopwright.simulator.accuracy.fit_levels import LevelFit
from flopwright.simulator.accuracy.fit_runs import fit_runs, fold_of, run_weights
from flopwright.simulator.accuracy.fit_stacks import (
    StackLevels,
    overlaid,
    shipped_levels,
    unit_calibration,
)
from flopwright.simulator.accuracy.memory import memory_scores
from flopwright.simulator.accuracy.published_files import load_published
from flopwright.simulator.accuracy.report import LABELS, AccuracyReport, Baseline, Skipped
from flopwright.simulator.accuracy.report_predict import (
    Advance,
    calibration_of,
    predictions,
    scored,
    skipped_rows,
)
from flopwright.simulator.accuracy.run_of_row import PlanFor, PublishedRun, published_runs
from flopwright.simulator.accuracy.score import Scored
from flopwright.simulator.calibration.model import Calibration

Folds = Literal["cell", "stack"]
PROTOCOLS: Final = {
    None: "committed stacks",
    "cell": "each (source, model, GPU) cell left out of the fit",
    "stack": "each software stack left out of the fit",
}
# Scatter of a baseline that learns nothing but a level, for its interval.
_BASELINE_LOG_STD: Final = 0.3


def accuracy_report(
    path: Path | None,
    by: Sequence[str] = (),
    folds: Folds | None = None,
    plan_for: PlanFor | None = None,
    advance: Advance | None = None,
) -> AccuracyReport:
    """Returns the report of a file of measured runs (the schema of training runs).

    Args:
        path: the file; None is the published runs that ship (scenarios/published).
        by: labels (report.LABELS) whose combinations get groups of their own.
        folds: what is left out of the fit at a time; None predicts with the committed stacks.
        plan_for: the planner's plan for runs that do not state theirs.
        advance: called with (runs done, runs in all).

    Raises:
        InputError: no such file or label, or a file that holds no measured runs.
    """
    _check_labels(by)
    if path is None:
        published = load_published()
        skipped: tuple[Skipped, ...] = ()
    else:
        published = published_runs(path, plan_for)
        skipped = skipped_rows(path, published)
    if folds is None:
        levels = shipped_levels()
        runs, failed = predictions(published.runs, levels, advance)
        baselines = _committed_baselines(published.runs, levels, {r.id for r in runs})
    else:
        runs, failed, levels, baselines = _by_folds(published.runs, folds, advance)
    memory = memory_scores(published.runs, leave_model_out=folds is not None)
    by_level = {**levels.by_level(), "memory": memory.free_parameters}
    return AccuracyReport(
        file=path.name if path is not None else "published runs that ship",
        protocol=PROTOCOLS[folds],
        runs=runs,
        memory=memory.runs,
        skipped=(*skipped, *failed),
        by=tuple(by),
        free_parameters=sum(by_level.values()),
        parameters_by_level=by_level,
        baselines=baselines,
    )


def _check_labels(by: Sequence[str]) -> None:
    unknown = [name for name in by if name not in LABELS]
    if unknown:
        raise InputError(
            [
                Violation(
                    field="--by", value=name, rule="runs have no such label",
                    nearest_fix=did_you_mean(name, LABELS),
                )
                for name in unknown
            ]
        )  # fmt: skip


def _committed_baselines(
    runs: Sequence[PublishedRun], levels: StackLevels, ids: set[str]
) -> dict[str, Baseline]:
    mine = [r for r in runs if r.id in ids]
    simple, flat = [], []
    for run in mine:
        if levels.constant_mfu:
            seconds = constant_mfu_step_s(run, levels.constant_mfu)
            simple.append(scored(run, seconds, _BASELINE_LOG_STD))
        if not run.in_overall:
            continue
        calibration = with_flat_products(calibration_of(run, levels))
        seconds = simulated_step_s(run, calibration)
        flat.append(scored(run, seconds, calibration.step_residual_log))
    return {
        "constant_mfu": Baseline(
            about=CONSTANT_MFU, runs=tuple(simple), free_parameters=len(levels.constant_mfu)
        ),
        "flat_gemm": Baseline(
            about=FLAT_GEMM, runs=tuple(flat), free_parameters=levels.free_parameters()
        ),
    }


def _by_folds(
    published: Sequence[PublishedRun], folds: Folds, advance: Advance | None
) -> tuple[tuple[Scored, ...], tuple[Skipped, ...], StackLevels, dict[str, Baseline]]:
    """Returns predictions by fits that did not see the fold, and the whole fit's size."""
    timed = [r for r in published if r.measured_step_s is not None]
    total = 4 * len(timed)

    def at(part: int) -> Advance | None:
        if advance is None:
            return None
        return lambda done, of: advance(part * len(timed) + len(timed) * done // of, total)

    whole = fit_runs(timed, advance=at(0))
    names = [fold_of(r, folds) for r in whole.runs]
    found = held_out(
        whole.fit, whole.arrays, whole.measured_s, run_weights(whole.runs), names, at(1)
    )
    out = _simulated(whole.runs, whole.fit, found, at(2))
    flat = fit_runs(whole.runs, lambda r: with_flat_products(_unit(r)), at(3))
    flat_out = held_out(
        flat.fit, flat.arrays, flat.measured_s, run_weights(flat.runs), names, None
    )
    simple = held_out_mfu_step_s(whole.runs, names)
    baselines = {
        "constant_mfu": Baseline(
            about=CONSTANT_MFU,
            runs=_scored_all(whole.runs, simple, np.full(len(simple), _BASELINE_LOG_STD)),
            free_parameters=len({mfu_key(r) for r in whole.runs}),
        ),
        "flat_gemm": Baseline(
            about=FLAT_GEMM,
            runs=_scored_all(flat.runs, np.exp(flat_out.log_s), flat_out.log_std),
            free_parameters=int(flat.fit.decided().sum()),
        ),
    }
    failed = tuple(
        Skipped(id=i, reason=reason, in_scope=True, configuration=i)
        for i, reason in whole.failed
    )  # fmt: skip
    return out, failed, whole.levels(), baselines


def _unit(run: PublishedRun) -> Calibration:
    return unit_calibration(run.stack, run.scenario.cluster.node.gpu)


def _scored_all(
    runs: Sequence[PublishedRun], seconds: Array, log_std: Array
) -> tuple[Scored, ...]:
    """Returns the runs with these predictions; one that nothing could be learnt for has none."""
    return tuple(
        scored(run, float(s), float(d))
        for run, s, d in zip(runs, seconds, log_std, strict=True)
        if np.isfinite(s)
    )


def _simulated(
    runs: Sequence[PublishedRun], fit: LevelFit, found: HeldOut, advance: Advance | None
) -> tuple[Scored, ...]:
    """Returns each run as the simulator itself predicts it with its fold's scalars."""
    out = []
    for row, run in enumerate(runs):
        values = fit.design.values(found.theta[row], np.array([row]))[0]
        spread = float(found.log_std[row])
        calibration = overlaid(run.stack, run.scenario.cluster.node.gpu, values, spread)
        out.append(scored(run, simulated_step_s(run, calibration), spread))
        if advance is not None:
            advance(row + 1, len(runs))
    return tuple(out)
