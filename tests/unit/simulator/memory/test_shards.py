"""ZeRO's cut: over dp_shard and cp, a whole copy in each replica group."""

from __future__ import annotations

import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.memory.shards import zero_shards
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.load import load_scenario


@pytest.mark.parametrize(
    ("axes", "dense", "expert"),
    [
        ({"dp_shard": 8}, 8, 8),
        ({"dp_shard": 8, "dp_replicate": 4}, 8, 8),
        ({"dp_shard": 8, "cp": 2, "tp": 4}, 16, 64),
        ({"dp_shard": 8, "tp": 2, "ep": 4, "dp_replicate": 2}, 8, 4),
        ({"dp_shard": 4, "tp": 2, "ep": 4, "etp": 2}, 4, 1),
    ],
)
def test_ranks_that_share_a_copy(axes: dict[str, int], dense: int, expert: int) -> None:
    shards = zero_shards(Candidates.from_plans([ParallelPlan.model_validate(axes)]))
    assert [float(s[0]) for s in shards] == [dense, expert]


def test_a_replica_group_holds_as_much_as_one_of_its_size_alone() -> None:
    scenario = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
    plans = [
        ParallelPlan(pp=16, ep=16, dp_shard=128, zero_stage=1),
        ParallelPlan(pp=16, ep=16, dp_shard=64, zero_stage=1),
        ParallelPlan(pp=16, ep=16, dp_shard=64, dp_replicate=2, zero_stage=1),
    ]
    whole, half, pair = (
        evaluate(scenario, Candidates.from_plans(plans))
        .memory_bytes["optimizer_state"]
        .max(axis=0)
    )
    assert pair == half
    assert pair > 1.9 * whole
