"""Attention residuals in a pipeline: what hops carry and chunks keep of finished sums."""

from __future__ import annotations

import numpy as np
import pytest

from flopwright.plan.hops import states_into_chunks
from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.training.predict import plan_costs, predict
from flopwright.simulator.training.rank_step import rank_step
from flopwright.spec.load import load_scenario

K3 = load_scenario("kimi_k3_mini_2cpu_fp32")
PRIOR = default_calibration(K3.cluster.node.gpu)
STATE = 4 * 128 * 192 * 4  # sequences, tokens, hidden numbers, bytes
# Chunks of 2, 1, 1 and 1 layers; blocks begin at layers 0, 2 and 4.
PLANS = {
    "interleaved": (
        ParallelPlan(pp=2, vpp=2, schedule="interleaved_1f1b", micro_batch_size=4),
        (1, 2, 2, 1),
    ),
    "zb_v": (ParallelPlan(pp=2, vpp=2, schedule="zb_v", micro_batch_size=4), (1, 2, 1, 2)),
    "1f1b": (ParallelPlan(pp=2, micro_batch_size=4), (1, 3)),
}


@pytest.mark.parametrize("name", PLANS)
def test_hops_carry_what_the_executor_sends(name: str) -> None:
    plan, into = PLANS[name]
    assert states_into_chunks(K3.model, plan) == into
    costs = plan_costs(K3, plan, PRIOR)
    np.testing.assert_array_equal(costs.send_bytes[:, 0], np.array([*into[1:], 0]) * STATE)
    events = [e for e in predict(K3, plan, PRIOR)[1] if e.cls == "pp_comm"]
    assert events
    for event in events:
        chunk = int(event.name.split("(")[1].split(",")[0])
        assert event.nbytes == into[chunk + event.name.startswith("RECV_B")] * STATE
    for rank in range(2):
        calls = [c for c in rank_step(K3, plan, rank, PRIOR).calls if c.collective == "recv"]
        for call in calls:
            chunk = int(call.action.split("(")[1].split(",")[0])
            assert call.nbytes == into[chunk + call.action.startswith("RECV_B")] * STATE


@pytest.mark.parametrize("name", PLANS)
def test_chunks_keep_the_sums_that_came(name: str) -> None:
    plan, into = PLANS[name]
    alone = plan_costs(K3, ParallelPlan(micro_batch_size=4), PRIOR).saved_bytes[:, 0].sum()
    found = plan_costs(K3, plan, PRIOR).saved_bytes[:, 0].sum()
    assert found - alone == pytest.approx(sum(n - 1 for n in into) * STATE, rel=1e-9)
