"""Holistic Trace Analysis reads a simulated trace and finds the times that we find.

`.ci/targets.sh` makes its environment; FLOPWRIGHT_EXPORT_TARGETS names their folder.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.report.trace import TraceEvent, kineto_traces, trace_bytes
from flopwright.simulator.engine.simulate import simulate
from flopwright.spec.load import load_scenario

Need = Callable[[str, bool, str], None]

# Prints, by rank, what HTA makes of the traces of a folder.
READER: Final = """
import json, sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
whole = analysis.get_temporal_breakdown(visualize=False)
kinds, _ = analysis.get_gpu_kernel_breakdown(visualize=False)
print(json.dumps({"breakdown": whole.to_dict("records"), "kinds": kinds.to_dict("records")}))
"""
COMPUTE: Final = {"forward", "backward", "recompute", "optimizer"}


def covered(events: list[TraceEvent]) -> float:
    """Returns the seconds in which at least one of the events runs."""
    total, until = 0.0, 0.0
    for event in sorted(events, key=lambda e: e.start_s):
        total += max(0.0, event.end_s - max(event.start_s, until))
        until = max(until, event.end_s)
    return total


def test_hta_finds_our_times(need_service: Need, tmp_path: Path) -> None:
    folder = os.environ.get("FLOPWRIGHT_EXPORT_TARGETS", "")
    python = Path(folder) / "hta" / "bin" / "python"
    how = ". .ci/targets.sh, which sets FLOPWRIGHT_EXPORT_TARGETS"
    need_service("Holistic Trace Analysis", bool(folder) and python.exists(), how)
    scenario = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
    workload = scenario.workload.model_copy(update={"global_batch_size": 64})
    scenario = scenario.model_copy(update={"workload": workload})
    plan = ParallelPlan(pp=4, ep=8, dp_shard=8, zero_stage=1, recompute="full")
    step = simulate(scenario, plan)
    traces = kineto_traces(step.trace, world_size=plan.world_size)
    for rank, data in traces.items():
        (tmp_path / f"rank-{rank}.json.gz").write_bytes(trace_bytes(data, zipped=True))
    done = subprocess.run(
        [str(python), "-c", READER, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert [row["rank"] for row in found["breakdown"]] == [0, 1, 2, 3]
    for row in found["breakdown"]:
        mine = [e for e in step.trace if e.rank == row["rank"]]
        length = max(e.end_s for e in mine) - min(e.start_s for e in mine)
        work = [e for e in mine if e.stream == "compute"]
        assert {e.cls for e in work} <= COMPUTE
        # HTA counts whole microseconds, each kernel's ends rounded.
        close = 2e-6 * len(mine)
        assert row["kernel_time(us)"] / 1e6 == pytest.approx(length, abs=close)
        assert row["compute_time(us)"] / 1e6 == pytest.approx(covered(work), abs=close)
        assert row["idle_time(us)"] / 1e6 == pytest.approx(length - covered(mine), abs=close)
    kinds = {row["kernel_type"] for row in found["kinds"]}
    assert {"COMPUTATION", "COMMUNICATION"} <= kinds
