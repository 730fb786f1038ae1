"""A trial's routers know how many micro-batches share a step's balance loss."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flopwright.executor.parallel.groups import GroupRegistry
from flopwright.executor.train.trial import start_trial
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import load_scenario


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("micro_batch_size", [8, 2, 1])
def test_share_is_one_over_the_micro_batches(one_rank: None, micro_batch_size: int) -> None:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    workload = scenario.workload.model_copy(update={"global_batch_size": 8})
    plan = SimpleNamespace(
        parallel=ParallelPlan(micro_batch_size=micro_batch_size), scenario=scenario
    )
    entry: Any = SimpleNamespace(name="a", plan=plan)
    no_data: Any = None
    trial = start_trial(entry, workload, no_data, GroupRegistry(), torch.device("cpu"))
    shares = {block.gate.balance_share for block in trial.moe_blocks().values()}
    assert shares == {micro_batch_size / 8}
