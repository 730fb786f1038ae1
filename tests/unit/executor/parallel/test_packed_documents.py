"""Rows packed with documents give what each document gives alone, under every kind of plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launched_ranks import run_ranks
from packing_checks import PLANS, scenario

from flopwright.executor.launch.supported import unsupported
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import make_plan_file

PROGRAM = Path(__file__).with_name("packing_checks.py")


@pytest.mark.slow
def test_loss_gradients_and_update_are_those_of_the_documents_alone(tmp_path: Path) -> None:
    for rank in run_ranks(PROGRAM, 2, tmp_path):
        assert set(rank) == set(PLANS)
        for name, off in rank.items():
            assert off["loss"] < 1e-12, (name, off)
            assert off["norm"] < 1e-11, (name, off)
            assert off["weights"] < 1e-12, (name, off)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cp": 2}, "cp 2"),
        ({"tp": 2, "micro_batch_size": 2}, "sequence_parallel and micro_batch_size 2"),
        ({"fused_loss": True}, "fused_loss"),
    ],
)
def test_plans_that_cannot_keep_documents_apart_are_refused(
    fields: dict[str, Any], said: str
) -> None:
    plan = make_plan_file(scenario("kimi_k2"), ParallelPlan(**fields), "p")
    (found,) = [v for v in unsupported(plan) if v.field == "workload.packing"]
    assert said in found.value


def test_models_whose_attention_knows_no_documents_are_refused() -> None:
    base = scenario("llama")
    sinks = base.model.attention.model_copy(update={"sinks": True})
    for update, said in (({"attention": sinks}, "sinks"), ({"mtp_layers": 1}, "mtp_layers 1")):
        changed = base.model_copy(update={"model": base.model.model_copy(update=update)})
        found = unsupported(make_plan_file(changed, ParallelPlan(), "p"))
        assert any(said in v.value for v in found if v.field == "workload.packing")
