"""Writes scenarios/published/: a representative spread of public runs, one file each.

Usage: python scripts/published_scenarios.py FOLDER, where FOLDER/validation/training_runs.csv
holds the measured runs (docs/accuracy.md says what they are; they are not part of this
repository).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from flopwright.simulator.accuracy.published_files import FOLDER, file_name, published_file
from flopwright.simulator.accuracy.run_of_row import PublishedRun, published_runs
from flopwright.simulator.calibration.files import write_atomically
from flopwright.spec.load import dump_yaml

MOST = 110
CELLS_A_SOURCE = 14
# A cell of so many runs is shown by two: the median in GPUs and the largest.
LARGE_CELL = 6

_HEADER = """A public training run: facts and figures as published, structure of this repository.
Written by scripts/published_scenarios.py; `assumed` is what the publication does not say."""


def chosen(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Returns the runs to show: one or two of each (source, model, GPU) cell, few of a source.

    Of a source with many cells those are taken that together show most GPUs and models.
    """
    cells: dict[str, dict[str, list[PublishedRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.in_overall:
            cells[run.source][run.cell].append(run)
    first, second = [], []
    for source in sorted(cells):
        for cell in _spread(cells[source], CELLS_A_SOURCE):
            mine = sorted(cells[source][cell], key=lambda r: (r.num_gpus, r.id))
            middle = mine[(len(mine) - 1) // 2]
            first.append(middle)
            largest = mine[-1]
            if len(mine) >= LARGE_CELL and largest.num_gpus != middle.num_gpus:
                second.append(largest)
    return sorted([*first, *second][:MOST], key=lambda r: r.id)


def _spread(cells: dict[str, list[PublishedRun]], most: int) -> list[str]:
    """Returns at most so many cells, GPUs and models taken in turn."""
    seen: dict[str, int] = defaultdict(int)
    left, out = sorted(cells), []
    while left and len(out) < most:
        best = min(left, key=lambda c: (seen[cells[c][0].gpu] + seen[cells[c][0].model_name], c))
        left.remove(best)
        out.append(best)
        seen[cells[best][0].gpu] += 1
        seen[cells[best][0].model_name] += 1
    return out


def main() -> None:
    """Reads, chooses and writes; files of runs no longer chosen are removed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    found = published_runs(options.folder / "validation" / "training_runs.csv")
    runs = chosen(found.runs)
    options.out.mkdir(parents=True, exist_ok=True)
    names = {file_name(run): run for run in runs}
    for stale in options.out.glob("*.yaml"):
        if stale.name not in names:
            stale.unlink()
    for name, run in names.items():
        text = dump_yaml(published_file(run), header=f"{_HEADER}\nSource: {run.where}")
        write_atomically(options.out / name, text)
    print(f"{len(names)} files in {options.out}")


if __name__ == "__main__":
    main()
