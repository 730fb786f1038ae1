"""How fast big rollout rounds are simulated: one JSON object as the last line.

Two rounds that people plan with: one agentic round of 4,096 attempts, up to 1M tokens and
1,000 tool calls each, all of which must end; and 200 steady rounds of 4,096 single-turn
attempts. The timed calls are those of `flopwright rollouts`, reports included, and the
figures beside the times come out of the timed runs themselves. One core; wall seconds.
Compiling is timed apart, in an empty folder; the peak is that of the whole process.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPEATS = 3
RESULT = Path(__file__).parent / "results" / "rollout_speed.json"
LIMITS = {"agentic_round_s": 10.0, "agentic_peak_bytes": 1e9, "steady_200_rounds_s": 5.0}


def agentic() -> dict[str, Any]:
    """Returns the scenario of the agentic round, as plain data."""
    return {
        "name": "agentic_4096_1m",
        "prompts": 512,
        "samples_per_prompt": 8,
        "prompt_tokens": 4096,
        "lengths": {"kind": "lognormal", "mean": 450_000, "sigma": 0.4, "cap": 900_000},
        "group_correlation": 0.6,
        "lambda": 1.0,
        "instances": 32,
        "gpus_per_instance": 8,
        "agent": {
            "turns": {"kind": "deterministic", "tokens": 1001},
            "tool_tokens": {"kind": "exponential", "mean": 300, "cap": 8192},
            "tool_time": {"kind": "lognormal", "mean": "8 s", "spread": 1.0, "at_most": "10 min"},
            "max_context": 1_048_576,
            "sandbox": {
                "create": "500 ms", "fork": "60 ms", "checkpoint": "133 ms", "resume": "49 ms",
                "hosts": 16, "host_cpus": 128, "cpus": 1, "overcommit": 6.5,
            },
        },
        "engine": {
            "decode": {
                "batch": [1, 2, 4, 8, 16, 32, 64, 128, 256],
                "base": [0.018, 0.0182, 0.0186, 0.0195, 0.021, 0.024, 0.029, 0.037, 0.052],
                "per_context_token": [1.0e-9] * 9,
            },
            "prefill": {"fixed": 0.002, "per_token": 1.5e-5, "per_pair": 1e-12},
            "kv_capacity_tokens": 48_000_000,
            "block_tokens": 64,
            "kv_bytes_per_token": 29_000,
            "chunk_tokens": 8192,
            "prefix_cache": True,
            "host_pool": {"size": "2 TB", "bandwidth": "200 GB/s"},
        },
        "throttle": {"high": 0.92, "low": 0.85},
        "schedule": {"concurrency": 160},
        "sources": {"all": "assumed: a benchmark, in the manner of published 1M-token loops"},
    }  # fmt: skip


def steady() -> dict[str, Any]:
    """Returns the scenario of the steady rounds, as plain data."""
    return {
        "name": "steady_4096",
        "prompts": 512,
        "samples_per_prompt": 8,
        "prompt_tokens": 1024,
        "lengths": {"kind": "lognormal", "mean": 14_000, "sigma": 1.0, "cap": 65_536},
        "lambda": 0.9,
        "instances": 32,
        "gpus_per_instance": 8,
        "decode": {
            "per_step": "20 ms", "per_attempt": "40 us", "per_context_token": "1 ns",
        },
        "prefill": {"fixed": 0.001, "per_token": 1e-5},
        "kv": {"per_token": "70272 B", "capacity": "150 GB"},
        "sources": {"all": "assumed: a benchmark"},
    }  # fmt: skip


def figures(report: Any) -> dict[str, float]:
    """Returns what the report of a timed run says."""
    return {
        "round_s": report.steady.round_time_s,
        "tokens_per_s": report.steady.tokens_per_s,
        "attempts_per_s": report.attempts_per_s,
        "mean_staleness": report.mean_staleness,
        "preemptions": report.steady.preemptions,
        "kv_peak_bytes": report.kv_peak_bytes,
    }


def main() -> None:
    """Prints the figures."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["XDG_CACHE_HOME"] = home
        from flopwright.simulator.rollouts.report import round_report
        from flopwright.simulator.rollouts.rounds import simulate, simulate_rounds
        from flopwright.spec.rollout import RolloutScenario

        single = RolloutScenario.model_validate(steady())
        acting = RolloutScenario.model_validate(agentic())
        begin = time.perf_counter()
        simulate(single.model_copy(update={"prompts": 32}), 1, 0, loop="compiled")
        compile_s = time.perf_counter() - begin

        steady_s, agentic_s = [], []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            rounds = simulate(single, 200, 0, loop="compiled")
            steady_s.append(time.perf_counter() - begin)
        for _ in range(REPEATS):
            begin = time.perf_counter()
            records = simulate_rounds(acting, 1, 0, loop="compiled")
            one = round_report(acting, records, warmup=0, seed=0)
            agentic_s.append(time.perf_counter() - begin)
    phase = records[0].phase
    middle = statistics.median(agentic_s)
    out = {
        "agentic_round_s": middle,
        "agentic_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "steady_200_rounds_s": statistics.median(steady_s),
        "compile_s": compile_s,
        "agentic": {
            **figures(one),
            "tool_calls": phase.tool_calls,
            "events": phase.events,
            "events_per_s": phase.events / middle,
            "evictions": phase.evictions,
            "longest": int(records[0].lengths.max()),
        },
        "steady": {
            **figures(rounds),
            "attempts": sum(m.completed for m in rounds.rounds),
        },
        "machine": f"{platform.processor() or platform.machine()}, one core",
        "date": datetime.now(UTC).date().isoformat(),
        "repeats": REPEATS,
        "spread": (max(agentic_s) - min(agentic_s)) / middle,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(out, indent=1) + "\n")
    for key, most in LIMITS.items():
        verdict = "met" if out[key] <= most else "MISSED"
        print(f"{key}: {out[key]:.4g}, at most {most:.4g}: {verdict}")
    print(json.dumps(out))


if __name__ == "__main__":
    main()
