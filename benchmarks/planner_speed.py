"""How long the planner takes for Kimi K2 on 2,048 H800s: one JSON object as the last line.

Each repeat is a process of its own, so that nothing is remembered from the one before: a
user's search has nothing to remember either.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime

from flopwright.planner.search import search
from flopwright.simulator.accuracy.named_stacks import scenario_calibration
from flopwright.spec.load import load_scenario

REPEATS = 3


def main() -> None:
    """Searches and refines the scenario a few times and prints CPU seconds (one core)."""
    runs = [_apart() for _ in range(REPEATS)]
    cpu_s = [r["cpu_s"] for r in runs]
    print(
        json.dumps(
            {
                "k2_search_s": statistics.median(cpu_s),
                "k2_search_wall_s": statistics.median(r["wall_s"] for r in runs),
                "candidates": runs[0]["candidates"],
                "feasible": runs[0]["feasible"],
                "replayed": runs[0]["replayed"],
                "refined": runs[0]["refined"],
                "machine": platform.processor() or platform.machine(),
                "date": datetime.now(UTC).date().isoformat(),
                "repeats": REPEATS,
                "spread": (max(cpu_s) - min(cpu_s)) / statistics.median(cpu_s),
            }
        )
    )


def _apart() -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--once"], check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def once() -> None:
    """Searches the scenario once, finalists through the event engine."""
    scenario = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
    calibration = scenario_calibration(scenario)
    cpu, wall = time.process_time(), time.perf_counter()
    result = search(scenario, calibration, refine=True)
    print(
        json.dumps(
            {
                "cpu_s": time.process_time() - cpu,
                "wall_s": time.perf_counter() - wall,
                "candidates": result.candidates,
                "feasible": result.fit,
                "replayed": result.replayed,
                "refined": result.refined,
            }
        )
    )


if __name__ == "__main__":
    once() if "--once" in sys.argv else main()
