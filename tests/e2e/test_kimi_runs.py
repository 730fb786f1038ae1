"""`flopwright run` of the minis of Kimi Linear and Kimi K3: plans of one model give one loss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file

pytestmark = pytest.mark.slow
STEPS = 3
PLANS: dict[str, dict[str, dict[str, Any]]] = {
    "kimi_linear_mini_2cpu_fp32": {
        "experts": {"dp_shard": 2, "ep": 2},
        "sequences": {"cp": 2},
    },
    "kimi_k3_mini_2cpu_fp32": {
        "stages": {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"},
        "sequences": {"cp": 2, "ep": 2, "context_parallel": "ulysses"},
    },
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_of_one_model_train_alike(name: str, tmp_path: Path) -> None:
    scenario = load_scenario(name)
    small = {"seq_len": 64, "global_batch_size": 4, "total_tokens": 64 * 4 * 40}
    workload = scenario.workload.model_copy(update=small)
    scenario = scenario.model_copy(update={"workload": workload})
    paths = []
    for plan, fields in PLANS[name].items():
        path = tmp_path / f"{plan}.yaml"
        parallel = ParallelPlan(micro_batch_size=2, **fields)
        path.write_text(dump_yaml(make_plan_file(scenario, parallel, plan)))
        paths.append(str(path))
    command = [sys.executable, "-m", "flopwright", "run", *paths, "--steps", str(STEPS)]
    command += ["--out", str(tmp_path / "run"), "--no-store"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = [
        json.loads((tmp_path / "run" / f"measurement-{plan}.json").read_text())
        for plan in PLANS[name]
    ]
    one, other = (m["held_out_loss"] for m in measured)
    assert one == pytest.approx(other, rel=1e-4)
    lines = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    losses = {p: [s["loss"] for s in steps if s["plan"] == p] for p in PLANS[name]}
    first, second = losses.values()
    assert len(first) == len(second) == STEPS
    assert first[0] == pytest.approx(second[0], rel=1e-6)
    assert first == pytest.approx(second, rel=1e-4)
