"""The update phase: packed sequences of many lengths against the training simulator's step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.accuracy.named_stacks import scenario_calibration
from flopwright.simulator.hardware.nodes.types import cluster_of
from flopwright.simulator.rollouts.update import UpdateTimes, representative_tokens, update_times
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.flops import model_flops_per_token
from flopwright.spec.load import load_model
from flopwright.spec.rollouts.layout import UpdatePhase
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import Workload

MODEL, CLUSTER = load_model("qwen25_7b"), cluster_of("hgx_h100", 8)
PLAN: dict[str, Any] = {"dp_shard": 8, "zero_stage": 3, "recompute": "full",
                        "data_parallel": "fsdp2"}  # fmt: skip


def _times(tokens: list[int], **changes: Any) -> UpdateTimes:
    data: dict[str, Any] = {"gpus": 8, "plan": PLAN, "stack": "fsdp-2025",
                            "micro_batch_tokens": 16_384, **changes}  # fmt: skip
    return update_times(MODEL, CLUSTER, UpdatePhase.model_validate(data), np.array(tokens))


def test_equal_sequences_cost_the_simulators_step() -> None:
    plan = ParallelPlan.model_validate({**PLAN, "micro_batch_size": 4})
    workload = Workload(seq_len=4096, global_batch_size=64, total_tokens="10B")
    scenario = Scenario(
        name="x", model=MODEL, cluster=CLUSTER, workload=workload, stack="fsdp-2025"
    )
    step = evaluate(scenario, Candidates.from_plans([plan]), scenario_calibration(scenario))
    assert _times([4096] * 64).update_s == pytest.approx(float(step.step_time_s[0]), rel=1e-6)


def test_a_token_sees_the_sequence_it_is_in() -> None:
    assert representative_tokens(np.array([100, 300])) == (100**2 + 300**2) // 400
    assert representative_tokens(np.array([512] * 7)) == 512


def test_longer_tails_cost_more_at_the_same_tokens() -> None:
    assert _times([2048] * 62 + [34_816, 32_768]).update_s > _times([3072] * 63 + [1024]).update_s


def test_mini_batches_pay_their_end_each_and_tokens_once() -> None:
    one, four = _times([4096] * 256), _times([4096] * 256, mini_batches=4)
    assert one.update_s < four.update_s < 1.1 * one.update_s
    double = _times([4096] * 512, mini_batches=8)
    assert double.update_s == pytest.approx(2 * four.update_s, rel=1e-6)


def test_forward_passes_cost_less_than_half_an_update_and_add_up() -> None:
    none = _times([4096] * 64)
    old, both = (_times([4096] * 64, log_prob=p) for p in (["old"], ["old", "reference"]))
    assert none.log_prob_s == 0
    assert 0.15 * old.update_s < old.log_prob_s < 0.4 * old.update_s
    assert both.log_prob_s == pytest.approx(2 * old.log_prob_s)
    teacher = _times([4096] * 64, log_prob=["teacher"])
    streamed = 7.615616512e9 * 2 / 8 / (63e9 * 0.8)
    assert teacher.log_prob_s - old.log_prob_s == pytest.approx(streamed, rel=1e-3)


def test_ptx_tokens_and_state_on_the_host_cost_their_time() -> None:
    plain, ptx = _times([4096] * 64), _times([4096] * 64, ptx_share=1.0)
    assert 1.7 * plain.update_s < ptx.update_s < 2.05 * plain.update_s
    moved = _times([4096] * 64, state_on_host=True)
    assert moved.load_s == pytest.approx(2 * 7.615616512e9 * 16 / 8 / (63e9 * 0.8))
    assert moved.update_s == plain.update_s


def test_a_published_mfu_takes_the_simulators_place() -> None:
    found = _times([4096] * 64, mfu=0.5)
    flops = model_flops_per_token(MODEL, 4096) * 64 * 4096
    assert found.update_s == pytest.approx(flops / (0.5 * 8 * 989e12), rel=0.001)


def test_a_plan_that_breaks_a_rule_or_misses_its_gpus_is_refused() -> None:
    with pytest.raises(InputError, match="heads"):
        _times([4096] * 64, plan={**PLAN, "dp_shard": 1, "tp": 8})
    with pytest.raises(ValueError, match="8"):
        _times([4096] * 64, plan={**PLAN, "dp_shard": 4})
