"""The fit of the levels to published runs: arrays, weights, correction, what it found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array
from flopwright.simulator.accuracy.baselines import constant_mfu
from flopwright.simulator.accuracy.crossval import predicted
from flopwright.simulator.accuracy.features import features_of, simulated_step_s
from flopwright.simulator.accuracy.fit_levels import LevelFit, active_scalars, design, fit_levels
from flopwright.simulator.accuracy.fit_stacks import UNSEEN, StackLevels, levels_of, overlaid
from flopwright.simulator.accuracy.fit_step import StepArrays, step_seconds
from flopwright.simulator.accuracy.fit_terms import (
    COMPOSED,
    TERMS,
    base_scalars,
    run_labels,
    weight_of,
)
from flopwright.simulator.accuracy.run_of_row import PublishedRun
from flopwright.simulator.calibration.model import Calibration

Advance = Callable[[int, int], None]
# Rounds of fitting and correcting: the correction hardly moves after the first.
_ROUNDS: Final = 1
# Runs that teach nothing: composed rows, rows known to be odd, runs whose plan is a guess.
_NOT_LEARNT_FROM: Final = frozenset({"odd", "own-plan", "tp-across-nodes"})
# Of the composed rows every so many teaches: they hold few independent numbers.
_COMPOSED_STRIDE: Final = 6
# And what such a row weighs beside a measured one: they must not move what all stacks share.
_COMPOSED_WEIGHT: Final = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFit:
    """A fit to published runs.

    Attributes:
        runs: those that could be priced; failed: id and reason of the others.
        arrays: of the runs, corrected to the simulator at the fitted scalars.
        measured_s: (R,).
    """

    runs: tuple[PublishedRun, ...]
    failed: tuple[tuple[str, str], ...]
    arrays: StepArrays
    measured_s: Array
    fit: LevelFit

    def levels(self, created: str = "", unseen_log: float = 0.2) -> StackLevels:
        """Returns the levels as they are written.

        Args:
            created: date; unseen_log: scatter that goes with a stack never seen.
        """
        _, deviation = predicted(self.fit, self.arrays, np.arange(len(self.runs)))
        spread: dict[str, list[float]] = {}
        for run, value in zip(self.runs, deviation, strict=True):
            spread.setdefault(run_labels(run)["stack"], []).append(float(value))
        by_stack = {name: float(np.sqrt(np.mean(np.square(v)))) for name, v in spread.items()}
        by_stack[UNSEEN] = unseen_log
        found = levels_of(self.fit, by_stack, created)
        shares = constant_mfu([r for r in self.runs if COMPOSED not in r.flags])
        return found.model_copy(
            update={"constant_mfu": {k: round(v, 4) for k, v in shares.items()}}
        )


def fit_runs(
    runs: Sequence[PublishedRun],
    calibration_of: Callable[[PublishedRun], Calibration] | None = None,
    advance: Advance | None = None,
) -> RunFit:
    """Returns the fit to the runs that have a measured step time.

    Args:
        calibration_of: what a run is priced with at factors of 1; None is its stack's.
    """
    kept, arrays, failed = features_of(runs, calibration_of, advance)
    measured = np.array([r.measured_step_s for r in kept], float)
    labels = [run_labels(r) for r in kept]
    plan = design(TERMS, labels, base_scalars(), active_scalars(arrays))
    weights = run_weights(kept)
    fit = fit_levels(plan, arrays, measured, weights)
    for _ in range(_ROUNDS):
        arrays = corrected(kept, arrays, fit, np.flatnonzero(weights), calibration_of)
        fit = fit_levels(plan, arrays, measured, weights, start=fit.posterior.theta)
    return RunFit(runs=kept, failed=failed, arrays=arrays, measured_s=measured, fit=fit)


def corrected(
    runs: Sequence[PublishedRun],
    arrays: StepArrays,
    fit: LevelFit,
    rows: NDArray[Any],
    calibration_of: Callable[[PublishedRun], Calibration] | None = None,
) -> StepArrays:
    """Returns the arrays whose step times at a fit's scalars are the simulator's own.

    Args:
        rows: the runs to correct; the others keep the array model's own step.
    """
    values = fit.design.values(fit.posterior.theta)
    seconds = step_seconds(arrays, values)[0]
    for row in rows:
        run = runs[row]
        unit = None if calibration_of is None else calibration_of(run)
        gpu = run.scenario.cluster.node.gpu
        over = overlaid(run.stack, gpu, values[row], fit.sigma, unit)
        seconds[row] = simulated_step_s(run, over)
    return arrays.corrected(seconds, values)


def run_weights(runs: Sequence[PublishedRun]) -> Array:
    """Returns the weight of each run: a cell counts by the root of its runs."""
    composed = np.cumsum([COMPOSED in r.flags for r in runs]) % _COMPOSED_STRIDE
    teaches = [
        not run.flags & _NOT_LEARNT_FROM and (COMPOSED not in run.flags or turn == 1)
        for run, turn in zip(runs, composed, strict=True)
    ]
    sizes = Counter(r.cell for r, yes in zip(runs, teaches, strict=True) if yes)
    share = [_COMPOSED_WEIGHT if COMPOSED in r.flags else 1.0 for r in runs]
    return np.array(
        [
            one * weight_of(sizes[r.cell]) if yes else 0.0
            for r, yes, one in zip(runs, teaches, share, strict=True)
        ]
    )


def fold_of(run: PublishedRun, kind: Literal["cell", "stack"]) -> str:
    """Returns what a run is left out together with."""
    return run.cell if kind == "cell" else run_labels(run)["stack"]
