"""How well an engine's step law is learnt: synthetic logs, and TensorRT-LLM's published grid.

    python benchmarks/rollout_calibration.py [FOLDER]

FOLDER (else FLOPWRIGHT_MEASURED_DATA) holds validation/rl_runs.csv. Of each system of the grid
the factor between measured and predicted is learnt on all cells but one, and the last is
predicted with it; without fit the engine model stands as it is. Then the three terms of a step
are fitted on two cells of one system and predict all others. The last line is one JSON object:
uncalibrated_error and calibrated_error are medians over the cells of |predicted / measured - 1|
of output tokens a second, three_terms says how the fit on two cells fares,
interval80_coverage is the share of fresh synthetic samples inside the fitted law's 80 %
interval.
"""

from __future__ import annotations

import csv
import datetime
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from flopwright.simulator.rollouts.engine.experiment import engine_metrics
from flopwright.simulator.rollouts.engine.fit import fit_steps
from flopwright.simulator.rollouts.engine.logs import EngineSample, samples_of
from flopwright.spec.load import SCENARIO_CATALOG
from flopwright.spec.rollouts.engine_experiment import EngineExperiment
from flopwright.spec.yaml_lines import read_yaml
from flopwright.store.foreign.engines import read_engine_log

CAPACITY = 1_000_000
TRUE_LAWS = ((8e-3, 3e-5, 4e-8), (20e-3, 1e-4, 1e-8), (5e-3, 1e-5, 1e-7))
REPEATS = 20


def synthetic_log(law: tuple[float, ...], lines: int, noise: float, seed: int) -> str:
    """Returns an engine's log of steps that follow a law, as vLLM writes it."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(lines):
        running = int(rng.integers(1, 200))
        context = running * int(rng.integers(200, 5000))
        step = law[0] + law[1] * running + law[2] * context
        rate = running / (step * rng.lognormal(0, noise))
        out.append(
            f"Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: "
            f"{rate:.1f} tokens/s, Running: {running} reqs, Waiting: 0 reqs, "
            f"GPU KV cache usage: {100 * context / CAPACITY:.4f}%"
        )
    return "\n".join(out) + "\n"


def _read(text: str) -> list[EngineSample]:
    """Returns the samples of a log, through the reader that `import-log` has."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vllm.log"
        path.write_text(text, encoding="utf-8")
        return samples_of(read_engine_log(path, "vllm").lines, CAPACITY)


def synthetic() -> dict[str, Any]:
    """Returns errors of the fitted terms and the coverage of intervals on fresh samples."""
    errors, inside = [], []
    for index, law in enumerate(TRUE_LAWS):
        for repeat in range(REPEATS):
            seed = 1000 * index + repeat
            found = fit_steps(_read(synthetic_log(law, 60, 0.06, seed)))
            errors += [abs(a / b - 1) for a, b in zip(found.coefficients, law, strict=True)]
            for s in _read(synthetic_log(law, 50, 0.06, seed + 500)):
                low, high = found.interval(s.running, s.context_tokens)
                inside.append(low <= s.step_s <= high)
    return {"term_error": statistics.median(errors), "coverage": float(np.mean(inside))}


# How far a term may lie from the prediction's (one sigma, in logarithms), and the noise of a cell.
PRIOR, NOISE = 0.4, 0.05
# The two cells that the terms are fitted on: one dense model, once long in, once long out.
FITTED_ON = ("trtllm_llama33_70b_h200_1024_8192", "trtllm_llama33_70b_h200_8192_1024")
_NUDGE = 0.05


def _cells(folder: Path) -> dict[str, tuple[str, float, list[float]]]:
    """Returns by cell: its system, measured tokens a second and GPU, and predicted ones.

    The predictions: as the engine model stands, and with each of the three terms nudged.
    """
    with (folder / "validation" / "rl_runs.csv").open(newline="") as file:
        values = {row["id"]: row["value"] for row in csv.DictReader(file)}
    out: dict[str, tuple[str, float, list[float]]] = {}
    for path in sorted((SCENARIO_CATALOG / "published_rl").glob("trtllm_*.yaml")):
        data = read_yaml(path).data
        row, experiment = data["rows"][0], EngineExperiment.model_validate(data["experiment"])
        if row["id"] not in values:
            continue
        scales = [(1.0, 1.0, 1.0)]
        scales += [tuple(1 + _NUDGE * (i == k) for i in range(3)) for k in range(3)]
        rates = [engine_metrics(experiment, scale=s)[row["metric"]] for s in scales]
        system = f"{experiment.model} on {experiment.node_type}"
        out[path.stem] = (system, float(values[row["id"]]), rates)
    return out


def grid(cells: dict[str, tuple[str, float, list[float]]]) -> tuple[float, float]:
    """Returns median errors as predicted, and with each system's other cells as calibration.

    A system has two or three cells, fewer than a law has terms: what they fit is the factor
    that all three terms share, the prediction being the prior of their ratios.
    """
    before, after = [], []
    for name, (system, measured, rates) in cells.items():
        others = [c for n, c in cells.items() if n != name and c[0] == system]
        logs = [np.log(m / r[0]) for _, m, r in others]
        factor = np.exp(np.mean(logs)) if logs else 1.0
        before.append(abs(rates[0] / measured - 1))
        after.append(abs(rates[0] * factor / measured - 1))
    return statistics.median(before), statistics.median(after)


def three_terms(cells: dict[str, tuple[str, float, list[float]]]) -> dict[str, Any]:
    """Returns how well the three terms of a step, fitted on two cells, predict the others.

    Two cells cannot fix three terms: each has a prior, the engine model's own. The law is taken
    as linear in the logarithms of the terms. "any_two": the same for every pair of cells.
    """
    names = list(cells)
    off = np.array([np.log(cells[n][2][0] / cells[n][1]) for n in names])
    slopes = np.array(
        [[np.log(r / cells[n][2][0]) / np.log1p(_NUDGE) for r in cells[n][2][1:]] for n in names]
    )

    def rest(pair: tuple[int, ...]) -> np.ndarray:
        a, r = slopes[list(pair)], off[list(pair)]
        x = -np.linalg.solve(a.T @ a / NOISE**2 + np.eye(3) / PRIOR**2, a.T @ r / NOISE**2)
        others = [i for i in range(len(names)) if i not in pair]
        return np.abs(np.expm1(off[others] + slopes[others] @ x))

    found = rest(tuple(names.index(n) for n in FITTED_ON))
    pairs = [rest(p) for p in itertools.combinations(range(len(names)), 2)]
    return {
        "cells": len(found),
        "median_error": float(np.median(found)),
        "largest_error": float(found.max()),
        "within_15": int((found <= 0.15).sum()),
        "any_two_median_error": float(np.median([np.median(p) for p in pairs])),
        "any_two_best_within_15": max(int((p <= 0.15).sum()) for p in pairs),
    }


def main() -> None:
    """Prints the figures; the last line is JSON."""
    folder = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("FLOPWRIGHT_MEASURED_DATA")
    logs = synthetic()
    cells = _cells(Path(folder)) if folder else {}
    before, after = grid(cells) if cells else (None, None)
    print(f"synthetic logs: median error of a term {logs['term_error']:.3f}")
    if folder is None:
        print("no folder of measured data: the grid is left out")
    terms = three_terms(cells) if cells else None
    if terms is not None:
        print(
            f"three terms fitted on two cells: {terms['within_15']} of {terms['cells']} others "
            f"within 15 %, median {terms['median_error']:.3f}, worst {terms['largest_error']:.3f}"
        )
    record = {
        "uncalibrated_error": before,
        "calibrated_error": after,
        "three_terms": terms,
        "interval80_coverage": logs["coverage"],
        "synthetic_term_error": logs["term_error"],
        "machine": platform.processor() or platform.machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "repeats": REPEATS,
        "spread": None,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
