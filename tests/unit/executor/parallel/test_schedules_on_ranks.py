"""Every schedule over 2 and 4 real ranks: the single process's numbers, and torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from launched_ranks import run_ranks

from flopwright.plan.schedules.placement import ScheduleName

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("schedule_checks.py")
Rank = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: Any) -> list[Rank]:
    world, folder = request.param, tmp_path_factory.mktemp("ranks")
    return run_ranks(PROGRAM, world, folder)


def test_every_schedule_is_run(ranks: list[Rank]) -> None:
    for rank in ranks:
        assert {name.split()[0] for name in rank} == set(get_args(ScheduleName))


def test_losses_and_gradients_equal_the_single_process(ranks: list[Rank]) -> None:
    for rank in ranks:
        for name, found in rank.items():
            assert found["gradients"] < 1e-13, name
            assert found["loss"] < 1e-14, name


def test_losses_and_gradients_equal_torchs_schedules(ranks: list[Rank]) -> None:
    compared = 0
    for rank in ranks:
        for name, found in rank.items():
            if "torch_gradients" in found:
                assert found["torch_gradients"] < 1e-13, name
                assert found.get("torch_loss", 0.0) < 1e-14, name
                compared += 1
    assert compared == 6 * len(ranks)


def test_the_executed_log_is_the_lowered_list(ranks: list[Rank]) -> None:
    assert all(found["log_equal"] for rank in ranks for found in rank.values())


def test_one_rank_has_the_loss(ranks: list[Rank]) -> None:
    for name in ranks[0]:
        holders = [r for r, rank in enumerate(ranks) if rank[name]["has_loss"]]
        assert holders == [0 if name in {"zb_v", "dualpipe_v"} else len(ranks) - 1], name
