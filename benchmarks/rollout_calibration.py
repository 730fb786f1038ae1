"""How well an engine's step law is learnt: synthetic logs, and TensorRT-LLM's published grid.

    python benchmarks/rollout_calibration.py [FOLDER]

FOLDER (else FLOPWRIGHT_MEASURED_DATA) holds validation/rl_runs.csv. Of each system of the grid
the factor between measured and predicted is learnt on all cells but one, and the last is
predicted with it; without fit the engine model stands as it is. The last
line is one JSON object: uncalibrated_error and calibrated_error are medians over the cells of
|predicted / measured - 1| of output tokens a second, interval80_coverage is the share of fresh
synthetic samples inside the fitted law's 80 % interval.
"""

from __future__ import annotations

import csv
import datetime
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


def _cells(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Returns (measured, predicted) tokens a second and GPU of the grid's cells, by system."""
    with (folder / "validation" / "rl_runs.csv").open(newline="") as file:
        values = {row["id"]: row["value"] for row in csv.DictReader(file)}
    out: dict[str, list[tuple[float, float]]] = {}
    for path in sorted((SCENARIO_CATALOG / "published_rl").glob("trtllm_*.yaml")):
        data = read_yaml(path).data
        row, experiment = data["rows"][0], EngineExperiment.model_validate(data["experiment"])
        if row["id"] in values:
            metric = engine_metrics(experiment)[row["metric"]]
            system = f"{experiment.model} on {experiment.node_type}"
            out.setdefault(system, []).append((float(values[row["id"]]), metric))
    return out


def grid(folder: Path) -> tuple[float, float]:
    """Returns median errors as predicted, and with each system's other cells as calibration.

    A system has two or three cells, fewer than a law has terms: what they fit is the factor
    that all three terms share, the prediction being the prior of their ratios.
    """
    before, after = [], []
    for cells in _cells(folder).values():
        for index, (measured, predicted) in enumerate(cells):
            others = [c for place, c in enumerate(cells) if place != index]
            factor = np.exp(np.mean([np.log(m / p) for m, p in others])) if others else 1.0
            before.append(abs(predicted / measured - 1))
            after.append(abs(predicted * factor / measured - 1))
    return statistics.median(before), statistics.median(after)


def main() -> None:
    """Prints the figures; the last line is JSON."""
    folder = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("FLOPWRIGHT_MEASURED_DATA")
    logs = synthetic()
    before, after = grid(Path(folder)) if folder else (None, None)
    print(f"synthetic logs: median error of a term {logs['term_error']:.3f}")
    if folder is None:
        print("no folder of measured data: the grid is left out")
    record = {
        "uncalibrated_error": before,
        "calibrated_error": after,
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
