"""Fits what lies between a run's tensors and its reading to published peaks.

    python scripts/fit_memory.py training_runs.csv

Writes simulator/accuracy/memory_constants.yaml: the allocator's reserve over its peak, what a
card holds beside the allocator, and the spread of each definition. The measured table itself
stays outside of the repository.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flopwright.simulator.accuracy.memory import fit_constants, run_bytes_of
from flopwright.simulator.accuracy.memory_constants import CONSTANTS, write_constants
from flopwright.simulator.accuracy.run_of_row import published_runs


def main() -> None:
    """Fits and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="table of measured runs (CSV)")
    parser.add_argument("--out", type=Path, default=CONSTANTS)
    args = parser.parse_args()
    runs = [r for r in published_runs(args.runs).runs if r.memory]
    found, failed = run_bytes_of(runs)
    write_constants(fit_constants(runs, found), args.out)
    print(f"{len(found)} runs with a measured memory, {len(failed)} without a prediction")


if __name__ == "__main__":
    main()
