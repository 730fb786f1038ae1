"""What travels between chunks where sub-layers read mixtures over depth."""

from __future__ import annotations

import pytest

from flopwright.plan.hops import states_into_chunks
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import load_model


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(pp=8),
        ParallelPlan(pp=4, vpp=2, schedule="interleaved_1f1b"),
        ParallelPlan(pp=3, layers_per_stage=(12, 24, 57)),
    ],
)
def test_every_finished_sum_travels_beside_the_running_one(plan: ParallelPlan) -> None:
    spec = load_model("kimi_k3")
    counts = []
    finished = 0  # sums handed in when a block begins, layer by layer
    for layers in plan.chunk_layers(spec.num_layers):
        counts.append(finished + 1)
        finished += sum(layer % 12 == 0 for layer in layers)
    assert states_into_chunks(spec, plan) == tuple(counts)


def test_one_state_travels_without_them() -> None:
    assert states_into_chunks(load_model("kimi_k2"), ParallelPlan(pp=8)) == ()
