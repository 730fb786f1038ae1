"""How fast the simulator prices, replays and simulates: one JSON object as the last line.

The timed functions are those that `plan` and `simulate` call. CPU seconds of one process
(time.process_time); imports, catalogs and a first call of each are not counted.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np

from flopwright.plan.lower import lower
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.space import legal_candidates
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.engine.cluster_links import ClusterLinks
from flopwright.simulator.engine.perturb import Perturbation, disturbance_of
from flopwright.simulator.engine.pipeline import run_step
from flopwright.simulator.training.durations import Durations
from flopwright.simulator.training.evaluate import evaluate
from flopwright.simulator.training.predict import durations_of, plan_costs
from flopwright.simulator.training.program import merge, program_of
from flopwright.simulator.training.replay import replay_step_seconds
from flopwright.spec.load import load_scenario
from flopwright.spec.scenario import Scenario

REPEATS = 5
REPLAYED_TOGETHER = 64  # planner/exact.py replays so many candidates at once
K2 = "kimi_k2_pretrain_2048gpu_h800_bf16"


def timed(work: Callable[[], object], repeats: int = REPEATS) -> dict[str, float]:
    """Returns the median CPU and wall seconds of `work` and the spread of the former."""
    work()
    cpu_s, wall_s = [], []
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        cpu_s.append(time.process_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
    middle = statistics.median(cpu_s)
    spread = (max(cpu_s) - min(cpu_s)) / middle
    return {"cpu_s": middle, "wall_s": statistics.median(wall_s), "spread": spread}


def with_batch(scenario: Scenario, global_batch_size: int) -> Scenario:
    """Returns the scenario with another batch."""
    workload = scenario.workload.model_copy(update={"global_batch_size": global_batch_size})
    return scenario.model_copy(update={"workload": workload})


def plans(scenario: Scenario, calibration: Calibration) -> dict[str, Any]:
    """Prices every legal plan of the scenario once, as the search does."""
    candidates = legal_candidates(scenario)
    times = timed(lambda: evaluate(scenario, candidates, calibration), repeats=3)
    return {
        "plans_per_cpu_s": len(candidates) / times["cpu_s"],
        "plans": len(candidates),
        "spread": times["spread"],
    }


def replays() -> dict[str, Any]:
    """Replays pp8 with 64 micro-batches, other durations in every column."""
    program = program_of(ParallelPlan(pp=8, dp_shard=2), 64)
    rng = np.random.default_rng(0)
    out: dict[str, Any] = {"entries": len(program.codes)}
    for columns in (REPLAYED_TOGETHER, 1024):
        durations = Durations(
            forward_s=rng.uniform(1, 2, (8, columns)),
            backward_s=rng.uniform(2, 4, (8, columns)),
            send_s=rng.uniform(0, 0.1, (8, columns)),
            reduce_s=rng.uniform(0, 1, (8, columns)),
            step_s=rng.uniform(0, 1, (8, columns)),
        )
        times = timed(lambda d=durations: replay_step_seconds(program, d))
        out[f"{columns}_together_per_cpu_s"] = columns / times["cpu_s"]
        out[f"{columns}_together_spread"] = times["spread"]
    return out


def simulations(scenario: Scenario, calibration: Calibration) -> dict[str, Any]:
    """Simulates 64 GPUs event by event: pp8 x dp8, 64 micro-batches, links as resources."""
    plan = ParallelPlan(pp=8, dp_shard=8, ep=8, zero_stage=1)
    scenario = with_batch(scenario, 64 * plan.dp)
    durations = durations_of(plan_costs(scenario, plan, calibration))
    program = program_of(plan, 64)
    links = ClusterLinks(scenario.cluster, plan)
    out: dict[str, Any] = {}
    alike = timed(lambda: run_step(program, durations, replicas=plan.dp, links=links))
    out["simulations_64gpu_per_cpu_s"] = 1 / alike["cpu_s"]
    out["spread"] = alike["spread"]
    perturbation = Perturbation(jitter=0.05)
    disturbance = disturbance_of(perturbation, plan, program)
    jitter = timed(lambda: run_step(program, durations, links=links, disturbance=disturbance))
    out["with_jitter_per_cpu_s"] = 1 / jitter["cpu_s"]
    out["with_jitter_spread"] = jitter["spread"]
    return out


def k2_step(
    scenario: Scenario, calibration: Calibration, plan: ParallelPlan, microbatches: int
) -> dict[str, float]:
    """Times a whole step from the plan: costs, list, program, events; nothing is cached."""
    scenario = with_batch(scenario, microbatches * plan.dp * plan.micro_batch_size)
    model = scenario.model.model_copy(update={"num_layers": 64})
    scenario = scenario.model_copy(update={"model": model})

    def step() -> float:
        durations = durations_of(plan_costs(scenario, plan, calibration))
        program = merge(lower(plan, microbatches))
        links = ClusterLinks(scenario.cluster, plan)
        return run_step(program, durations, replicas=plan.dp, links=links).step_time_s

    return timed(step, repeats=3)


def main() -> None:
    """Runs all and prints the object."""
    scenario = load_scenario(K2)
    calibration = default_calibration(scenario.cluster.node.gpu)
    priced, replayed = plans(scenario, calibration), replays()
    simulated = simulations(scenario, calibration)
    pipeline = {"pp": 16, "vpp": 4, "ep": 16, "zero_stage": 1, "schedule": "interleaved_1f1b"}
    big = k2_step(scenario, calibration, ParallelPlan(dp_shard=128, **pipeline), 128)
    long = k2_step(scenario, calibration, ParallelPlan(dp_shard=16, **pipeline), 1024)
    print(
        json.dumps(
            {
                "plans_per_cpu_s": priced["plans_per_cpu_s"],
                "replays_per_cpu_s": replayed[f"{REPLAYED_TOGETHER}_together_per_cpu_s"],
                "simulations_64gpu_per_cpu_s": simulated["simulations_64gpu_per_cpu_s"],
                "k2_step_wall_s": big["wall_s"],
                "simulations_64gpu_with_jitter_per_cpu_s": simulated["with_jitter_per_cpu_s"],
                "k2_256gpu_1024_microbatches_wall_s": long["wall_s"],
                "replays_1024_together_per_cpu_s": replayed["1024_together_per_cpu_s"],
                "plans": priced["plans"],
                "machine": platform.processor() or platform.machine(),
                "date": datetime.now(UTC).date().isoformat(),
                "repeats": REPEATS,
                "spread": {
                    "plans_per_cpu_s": priced["spread"],
                    "replays_per_cpu_s": replayed[f"{REPLAYED_TOGETHER}_together_spread"],
                    "simulations_64gpu_per_cpu_s": simulated["spread"],
                    "simulations_64gpu_with_jitter_per_cpu_s": simulated["with_jitter_spread"],
                    "k2_step_cpu_s": big["spread"],
                },
                "k2_step_cpu_s": big["cpu_s"],
            }
        )
    )


if __name__ == "__main__":
    main()
