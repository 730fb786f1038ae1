"""Replaying measured actions gives back the step they were measured in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import ActionKind
from flopwright.simulator.training.durations import Disturbance, Durations
from flopwright.simulator.training.measured import NORM, replayed_step_seconds
from flopwright.simulator.training.program import Op, Program, program_of
from flopwright.simulator.training.replay import replay

MICRO_BATCHES, SAMPLES, SEND_S, REDUCE_S = 8, 4, 1e-3, 0.3
PLANS: dict[str, dict[str, Any]] = {
    "1f1b": {"pp": 2},
    "gpipe": {"pp": 3, "schedule": "gpipe"},
    "interleaved": {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"},
    "zb_h1": {"pp": 4, "schedule": "zb_h1"},
    "zb_v": {"pp": 2, "vpp": 2, "schedule": "zb_v"},
    "dualpipe_v": {"pp": 2, "vpp": 2, "schedule": "dualpipe_v"},
    "recompute": {"pp": 2, "recompute": "full"},
    "dp": {"dp_shard": 2},
    "pp dp": {"pp": 2, "dp_shard": 2},
}


def simulated(program: Program, replicas: int) -> tuple[np.ndarray[Any, Any], list[Any]]:
    """Returns the seconds of disturbed steps, and what a clock would have shown of them."""
    rng = np.random.default_rng(3)
    chunks = np.ones(program.num_chunks)
    durations = Durations(
        forward_s=chunks,
        backward_s=2 * chunks,
        weight_s=0.9 * chunks,
        recompute_s=0.5 * chunks,
        send_s=SEND_S * chunks,
        reduce_s=REDUCE_S * np.ones(program.num_stages),
        step_s=0.7 * np.ones(program.num_stages),
    )
    places = [sum(c.stage == s for c in program.codes) for s in range(program.num_stages)]
    disturbance = Disturbance(
        factors=tuple(rng.uniform(0.5, 2.0, (n, SAMPLES, replicas)) for n in places),
        links=np.ones((program.num_stages, replicas)),
    )
    timeline = replay(program, durations, disturbance)
    own, _ = durations.parts(program)
    steps = [
        [
            [
                _clock(program, timeline, own, disturbance, (stage, sample, replica))
                for replica in range(replicas)
            ]
            for stage in range(program.num_stages)
        ]
        for sample in range(SAMPLES)
    ]
    return timeline.step_time_s.max(axis=-1), steps


def _clock(
    program: Program, timeline: Any, own: Any, disturbance: Disturbance, at: tuple[int, int, int]
) -> dict[str, tuple[float, float]]:
    stage, sample, replica = at
    out, free = {}, 0.0
    for i, (code, action) in enumerate(zip(program.codes, program.actions, strict=True)):
        if code.stage != stage:
            continue
        begin, end = (float(t[i, sample, replica]) for t in (timeline.start_s, timeline.end_s))
        if code.op == Op.LANE:
            begin = end = free
        elif code.op == Op.FIRST:
            pair = next(c for c in program.codes if c.partner == i)
            row = program.pairs[pair.row - program.num_rows][0]
            end = begin + own[row] * disturbance.factors[stage][code.place, sample, replica]
        elif code.op == Op.SECOND:
            begin = free
        elif action.kind is ActionKind.OPTIMIZER_STEP:
            begin, out[NORM] = free, (free, free)
        elif code.op == Op.REDUCE:
            begin = free
        out[str(action)], free = (begin, end), end
    out[""] = (0.0, free)
    return out


@pytest.mark.parametrize("name", PLANS)
def test_replay_gives_the_step_back(name: str) -> None:
    plan = ParallelPlan(**PLANS[name])
    program = program_of(plan, MICRO_BATCHES)
    seconds, steps = simulated(program, plan.dp)
    assert seconds.std() > 0.01 * seconds.mean()
    np.testing.assert_allclose(replayed_step_seconds(program, steps), seconds, rtol=1e-3)


def test_gaps_and_full_buffers_count_as_work() -> None:
    """The clock of a rank whose every action is followed by a pause, a receive's too."""
    program = program_of(ParallelPlan(pp=2), 2)
    first = {
        "": (0.0, 16.0),
        "F(0,0)": (0.5, 2.0),
        "SEND_F(0,0)": (2.1, 2.2),
        "F(0,1)": (2.5, 4.0),
        "SEND_F(0,1)": (4.0, 4.1),
        "RECV_B(0,0)": (4.5, 8.0),
        "B(0,0)": (8.5, 10.0),
        "RECV_B(0,1)": (10.5, 13.0),
        "B(0,1)": (13.0, 15.0),
        "OPTIM": (15.0, 16.0),
    }
    second = {
        "": (0.0, 13.9),
        "RECV_F(1,0)": (0.0, 2.2),
        "F(1,0)": (2.2, 4.0),
        "B(1,0)": (4.0, 7.5),
        "SEND_B(1,0)": (7.9, 7.95),
        "RECV_F(1,1)": (8.0, 8.4),
        "F(1,1)": (8.5, 10.0),
        "B(1,1)": (10.0, 12.5),
        "SEND_B(1,1)": (12.9, 12.9),
        "OPTIM": (12.9, 13.9),
    }
    found = replayed_step_seconds(program, [[[first], [second]]])
    assert found[0] == pytest.approx(16.0, rel=1e-9)
