"""What travels between chunks where sub-layers read mixtures over depth."""

from __future__ import annotations

import pytest

from flopwright.plan.hops import states_into_chunks, sums_held
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.placement import stage_of_chunk
from flopwright.spec.load import load_model

PLANS = [
    ParallelPlan(pp=8),
    ParallelPlan(pp=4, vpp=2, schedule="interleaved_1f1b"),
    ParallelPlan(pp=4, vpp=6, schedule="interleaved_1f1b"),
    ParallelPlan(pp=6, vpp=2, schedule="zb_v"),
    ParallelPlan(pp=3, layers_per_stage=(12, 24, 57)),
    ParallelPlan(pp=2, vpp=2, schedule="dualpipe_v", layers_per_stage=(40, 0, 13, 40)),
]


@pytest.mark.parametrize("plan", PLANS)
def test_a_sum_comes_to_a_stage_once(plan: ParallelPlan) -> None:
    """Sums are handed from stage to stage here one by one, by who has which."""
    spec = load_model("kimi_k3")
    stages: list[set[int]] = [set() for _ in range(plan.pp)]
    finished = 0  # a sum is finished where a block begins
    states, held = [], []
    for chunk, layers in enumerate(plan.chunk_layers(spec.num_layers)):
        mine = stages[stage_of_chunk(plan, chunk)]
        held.append(len(mine))
        assert mine == set(range(len(mine)))
        states.append(1 + len(set(range(finished)) - mine))
        mine.update(range(finished))
        finished += sum(layer % 12 == 0 for layer in layers)
        mine.update(range(finished))
    assert states_into_chunks(spec, plan) == tuple(states)
    assert sums_held(spec, plan) == tuple(held)


def test_more_chunks_a_stage_send_less_over_a_hop() -> None:
    """Of nine sources a stage of a long pipeline gets all; one that is met again, few."""
    spec = load_model("kimi_k3")
    assert max(states_into_chunks(spec, ParallelPlan(pp=8))) == 8
    met_again = ParallelPlan(pp=4, vpp=6, schedule="interleaved_1f1b")
    assert max(states_into_chunks(spec, met_again)[4:]) <= 3


def test_one_state_travels_without_them() -> None:
    assert states_into_chunks(load_model("kimi_k2"), ParallelPlan(pp=8)) == ()
    assert sums_held(load_model("kimi_k2"), ParallelPlan(pp=8)) == ()
