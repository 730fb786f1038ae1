"""The schedules' rules on many candidates are those of one plan."""

from __future__ import annotations

import numpy as np
import pytest

from flopwright.plan.lower import lower, reduces_gradients, units
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.in_flight import max_in_flight
from flopwright.plan.schedules.placement import (
    CHUNKS_PER_STAGE,
    ScheduleName,
    fewest_microbatches,
    in_rounds,
)
from flopwright.plan.schedules.registry import compute_actions
from flopwright.simulator.memory.in_flight import in_flight
from flopwright.simulator.training.candidates import SCHEDULES, Candidates
from flopwright.simulator.training.schedule_rules import chunks_fit, paired, reduces


def test_who_reduces_is_the_same_for_many_as_for_one() -> None:
    plans = [
        ParallelPlan(
            dp_shard=dp, tp=tp, cp=cp, ep=ep, etp=etp, sequence_parallel=cut, data_parallel="none"
        )
        for dp in (1, 2)
        for cp in (1, 2)
        for tp in (1, 2, 4)
        for ep in (1, 2, 4)
        for etp in (1, 2)
        for cut in (True, False)
        if (dp * cp * tp) % (ep * etp) == 0
    ]
    expected = [reduces_gradients(p) for p in plans]
    np.testing.assert_array_equal(reduces(Candidates.from_plans(plans)), expected)
    assert 0 < sum(expected) < len(plans)
    assert all(any(a.kind == "REDUCE_GRAD" for a in lower(p, 1)[0]) == e
               for p, e in zip(plans, expected, strict=True))  # fmt: skip


def test_pairs_stand_in_the_lists_of_the_schedules_that_are_said_to_have_them() -> None:
    plans = [ParallelPlan(pp=2, vpp=CHUNKS_PER_STAGE[s][0], schedule=s) for s in SCHEDULES]
    found = [
        any(len(u) == 2 for actions in compute_actions(p, 8) for u in units(actions))
        for p in plans
    ]
    candidates = Candidates.from_plans(plans)
    np.testing.assert_array_equal(paired(candidates), found)
    assert chunks_fit(candidates).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3, 8])
def test_memory_counts_as_many_forwards_as_the_formula(schedule: ScheduleName, pp: int) -> None:
    least, most = CHUNKS_PER_STAGE[schedule]
    for vpp in range(least, (most or 3) + 1):
        for m in sorted({1, 2, 5, pp, 2 * pp, 3 * pp, 6 * pp}):
            if m < fewest_microbatches(schedule, pp) or (in_rounds(schedule, vpp) and m % pp):
                continue
            plan = ParallelPlan(pp=pp, vpp=vpp, schedule=schedule)
            held = [int(x.sum(axis=1).max()) for x in in_flight(schedule, pp, vpp, m)]
            assert held == [max_in_flight(plan, s, m) for s in range(pp)]
