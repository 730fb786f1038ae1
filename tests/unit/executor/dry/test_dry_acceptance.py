"""The plans that a dry run must show: every role of K2 on 2,048 ranks and of Llama 405B.

Each takes some minutes on two cores: the times and the memory measured are in docs/dry_run.md.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_model, load_scenario, make_plan_file

GIB = 2**30
PUBLISHED = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")


def _with(plan: ParallelPlan, name: str, **workload: object) -> PlanFile:
    """Returns a plan of the published run's cluster and formats, trained by AdamW."""
    adamw = PUBLISHED.workload.optimizer.model_copy(update={"kind": "adamw"})
    work = PUBLISHED.workload.model_copy(update={"optimizer": adamw, **workload})
    model = load_model("llama31_405b" if name == "llama" else "kimi_k2")
    scenario = PUBLISHED.model_copy(update={"model": model, "workload": work})
    return make_plan_file(scenario, plan, name)


PLANS = {
    "k2": (_with(ParallelPlan(dp_shard=128, pp=16, ep=16, zero_stage=1), "k2"), 16 * 16),
    "llama": (
        _with(
            ParallelPlan(dp_shard=16, pp=16, tp=8, zero_stage=1),
            "llama",
            seq_len=8192,
            global_batch_size=512,
        ),
        16 * 8,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_every_role_is_the_simulators(name: str, tmp_path: Path) -> None:
    plan, num_roles = PLANS[name]
    path = tmp_path / f"{name}.yaml"
    path.write_text(dump_yaml(plan))
    command = [sys.executable, "-m", "flopwright", "run", str(path), "--dry"]
    done = subprocess.run(
        [*command, "--rank", "all-roles", "--json"], capture_output=True, text=True, check=False
    )
    roles = json.loads(done.stdout)[0]["roles"]
    assert [r["differences"] for r in roles if r["differences"]] == []
    assert done.returncode == 0
    assert len(roles) == num_roles
    assert sum(r["whole_step"] for r in roles) == plan.parallel.pp
    for role in roles:
        predicted, recorded = role["predicted"], role["recorded"]
        assert predicted["traffic"] == recorded["traffic"]
        if role["whole_step"]:  # a short one never fills the pipeline (docs/dry_run.md)
            assert recorded["peak_bytes"] == pytest.approx(predicted["peak_bytes"], rel=0.01)
    # the largest of the processes that ever ran below this one, for each core one
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 6 * GIB
