"""How long the planner takes for Kimi K2 on 2,048 H800s: one JSON object as the last line."""

from __future__ import annotations

import json
import platform
import statistics
import time
from datetime import UTC, datetime

from flopwright.planner.search import search
from flopwright.simulator.calibration.files import default_calibration
from flopwright.spec.load import load_scenario

REPEATS = 3


def main() -> None:
    """Searches the scenario a few times and prints CPU seconds (one core)."""
    scenario = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
    calibration = default_calibration(scenario.cluster.node.gpu)
    cpu_s, wall_s = [], []
    for _ in range(REPEATS):
        cpu, wall = time.process_time(), time.perf_counter()
        result = search(scenario, calibration)
        cpu_s.append(time.process_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
    print(
        json.dumps(
            {
                "k2_search_s": statistics.median(cpu_s),
                "k2_search_wall_s": statistics.median(wall_s),
                "candidates": result.candidates,
                "feasible": result.fit,
                "machine": platform.processor() or platform.machine(),
                "date": datetime.now(UTC).date().isoformat(),
                "repeats": REPEATS,
                "spread": (max(cpu_s) - min(cpu_s)) / statistics.median(cpu_s),
            }
        )
    )


if __name__ == "__main__":
    main()
