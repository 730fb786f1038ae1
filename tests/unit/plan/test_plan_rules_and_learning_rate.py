"""Impossible splits are named with their fix; the learning rate has its boundary values."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from flopwright.plan.learning_rate import learning_rate_at
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.spec.load import load_scenario
from flopwright.spec.workload import LearningRate, Workload

K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")


@pytest.mark.parametrize(
    ("plan", "field", "fix"),
    [
        ({"pp": 64, "dp_shard": 64}, "parallel.world_size", "2048 GPUs"),
        ({"dp_shard": 128, "ep": 48}, "parallel.ep", "nearest valid: 32, 64"),
        ({"tp": 3}, "parallel.tp", "nearest valid: 2, 4"),
        ({"pp": 64}, "parallel.pp", "at most 61"),
        ({"micro_batch_size": 3}, "parallel.micro_batch_size", "nearest valid: 2, 4"),
        ({"pp": 2, "layers_per_stage": (60, 2)}, "parallel.layers_per_stage", "[31, 30]"),
        ({"pp": 2, "zero_stage": 3}, "parallel.zero_stage", "zero_stage 1"),
        ({"vpp": 2}, "parallel.schedule", "interleaved_1f1b"),
        ({"schedule": "interleaved_1f1b"}, "parallel.schedule", "use 1f1b, or vpp 2"),
        ({"schedule": "zb_v", "vpp": 3}, "parallel.schedule", "or vpp 2"),
        ({"schedule": "dualpipe_v"}, "parallel.schedule", "use 1f1b, or vpp 2"),
        (
            {"schedule": "dualpipe_v", "vpp": 2, "pp": 16, "dp_shard": 128, "micro_batch_size": 8},
            "parallel.schedule",
            "pp of at most 8, zb_v",
        ),
        (
            {"schedule": "zb_h1", "vpp": 2, "pp": 3, "dp_shard": 128},
            "parallel.pp",
            "nearest valid pp: 2, 4",
        ),
    ],
)
def test_each_rule_names_its_field_and_fix(plan: dict[str, object], field: str, fix: str) -> None:
    found = {v.field: v for v in plan_violations(ParallelPlan.model_validate(plan), K2)}
    assert field in found
    assert fix in found[field].nearest_fix


def test_the_published_split_breaks_no_rule() -> None:
    assert plan_violations(ParallelPlan(pp=16, dp_shard=128, ep=16, zero_stage=1), K2) == ()


def test_all_violations_come_at_once() -> None:
    bad = ParallelPlan(tp=3, pp=64, dp_shard=64, ep=5, micro_batch_size=3)
    assert len(plan_violations(bad, K2)) >= 4


def test_two_schedules_of_one_split_have_two_labels() -> None:
    """A measurement is stored under its plan's label."""
    labels = {ParallelPlan(pp=2, schedule=s).label() for s in ("gpipe", "1f1b")}
    assert labels == {"pp2 gpipe dp1 mbs1", "pp2 dp1 mbs1"}
    assert ParallelPlan(schedule="gpipe").label() == ParallelPlan().label()


def workload(lr: LearningRate) -> Workload:
    return Workload(seq_len=10, global_batch_size=10, total_tokens=10_000, learning_rate=lr)


def test_cosine_starts_at_peak_and_ends_at_final() -> None:
    w = workload(LearningRate(kind="cosine", peak=1.0, final=0.1, warmup_steps=10))
    rates = [learning_rate_at(s, w) for s in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


def test_wsd_holds_until_its_token() -> None:
    lr = LearningRate(kind="wsd", peak=1.0, final=0.0, warmup_steps=5, hold_until_tokens=6000)
    rates = [learning_rate_at(s, workload(lr)) for s in range(101)]
    assert set(rates[5:61]) == {1.0}
    assert rates[61] < 1.0
    assert rates[80] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0)


def test_schedules_equal_torchs() -> None:
    warmup, hold, steps, peak, final = 7, 40, 100, 0.4, 0.04

    def torchs(*parts: Any, milestones: list[int]) -> list[float]:
        optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
        made = [part(optimizer) for part in parts]
        schedule = lr_scheduler.SequentialLR(optimizer, made, milestones)
        rates = []
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return rates

    def warm(o: Any) -> Any:  # torch's first factor is that of our step 0: 1 / warmup
        return lr_scheduler.LinearLR(o, 1 / warmup, 1.0, warmup - 1)

    def cosine(start: int) -> Any:
        return lambda o: lr_scheduler.CosineAnnealingLR(o, steps - start, final)

    def linear(o: Any) -> Any:
        return lr_scheduler.LinearLR(o, 1.0, final / peak, steps - warmup)

    def held(o: Any) -> Any:
        return lr_scheduler.ConstantLR(o, 1.0, 1)

    given: dict[str, Any] = {"peak": peak, "final": final, "warmup_steps": warmup}
    expected = {
        LearningRate(kind="cosine", **given): torchs(warm, cosine(warmup), milestones=[warmup]),
        LearningRate(kind="linear", **given): torchs(warm, linear, milestones=[warmup]),
        LearningRate(kind="constant", **given): torchs(warm, held, milestones=[warmup]),
        LearningRate(kind="wsd", hold_until_tokens=hold * 100, **given): torchs(
            warm, held, cosine(hold), milestones=[warmup, hold]
        ),
    }
    for lr, rates in expected.items():
        ours = [learning_rate_at(s, workload(lr)) for s in range(steps)]
        assert ours == pytest.approx(rates, rel=1e-12), lr.kind
