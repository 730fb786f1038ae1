"""Fits the software stacks to published training runs and writes their levels.

Usage: python scripts/fit_stacks.py FOLDER, where FOLDER/validation/training_runs.csv holds
the measured runs (docs/accuracy.md says what they are; they are not part of this repository).
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

import numpy as np

from flopwright.simulator.accuracy.crossval import held_out
from flopwright.simulator.accuracy.fit_runs import RunFit, fit_runs, fold_of, run_weights
from flopwright.simulator.accuracy.fit_stacks import LEVELS
from flopwright.simulator.accuracy.run_of_row import published_runs
from flopwright.simulator.calibration.files import write_atomically
from flopwright.spec.load import dump_yaml

_HEADER = """Software stacks, kernels and processors as fitted to published training runs.
Source: measured runs of 2021 to 2026 that others published (docs/accuracy.md lists who);
only fitted coefficients stand here. Licence: Apache-2.0, as this repository. changed: fitted.
Written by scripts/fit_stacks.py."""


def main() -> None:
    """Fits and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=LEVELS)
    options = parser.parse_args()
    published = published_runs(options.folder / "validation" / "training_runs.csv")
    found = fit_runs([r for r in published.runs if r.measured_step_s is not None])
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    levels = found.levels(created=today, unseen_log=unseen_spread(found))
    write_atomically(options.out, dump_yaml(levels, header=_HEADER))
    print(
        f"{len(found.runs)} runs, {levels.free_parameters()} parameters, "
        f"{found.fit.effective_parameters():.0f} of them decided by the runs: {options.out}"
    )
    for identity, reason in found.failed:
        print(f"left out: {identity}: {reason}")


def unseen_spread(found: RunFit) -> float:
    """Returns the scatter that goes with a stack never seen, each stack left out in turn."""
    weights = run_weights(found.runs)
    folds = [fold_of(run, "stack") for run in found.runs]
    out = held_out(found.fit, found.arrays, found.measured_s, weights, folds)
    return float(np.sqrt(np.average(out.log_std**2, weights=weights)))


if __name__ == "__main__":
    main()
