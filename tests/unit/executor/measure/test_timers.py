from __future__ import annotations

import itertools

import pytest
import torch

from flopwright.executor.measure import timers
from flopwright.executor.measure.timers import ActionTimer, StepTrace, without_waiting
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.attribution import exposed_time
from flopwright.report.trace import TraceEvent


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves one second at each look."""
    ticks = itertools.count(1000)
    monkeypatch.setattr(timers.time, "perf_counter", lambda: float(next(ticks)))


def event(rank: int, name: str, cls: str, start: float, end: float) -> TraceEvent:
    return TraceEvent(rank, "compute", name, cls, start, end)


@pytest.mark.usefixtures("ticking")
def test_an_inner_action_cuts_the_outer_one() -> None:
    timer = ActionTimer(3, torch.device("cpu"))
    timer.start_step()  # begins at tick 1, after tick 0 for the machine's clock
    timer.begin("F(0,0)", "forward")  # 2
    with timer.action("ep_dispatch", "ep_comm", 64):  # 3 .. 4
        pass
    timer.end()  # 5
    trace = timer.finish_step()  # 6
    rows = [(e.name, e.cls, e.start_s, e.end_s, e.nbytes) for e in trace.events]
    assert rows == [
        ("F(0,0)", "forward", 1.0, 2.0, 0),
        ("ep_dispatch", "ep_comm", 2.0, 3.0, 64),
        ("F(0,0)", "forward", 3.0, 4.0, 0),
    ]
    assert trace.duration_s == 5.0
    assert {e.rank for e in trace.events} == {3}
    assert sum(exposed_time(trace.events, 3, trace.duration_s).values()) == pytest.approx(5.0)


@pytest.mark.usefixtures("ticking")
def test_a_new_step_forgets_the_old_one() -> None:
    timer = ActionTimer(0, torch.device("cpu"))
    for _ in range(2):
        timer.start_step()
        with timer.action("OPTIM", "optimizer"):
            pass
        assert len(timer.finish_step().events) == 1


def test_waiting_in_a_collective_is_not_communication() -> None:
    slow = StepTrace(50.0, 1.0, (event(0, "REDUCE_GRAD", "dp_comm", 0.8, 0.9),))
    fast = StepTrace(50.1, 0.9, (event(1, "REDUCE_GRAD", "dp_comm", 0.2, 0.8),))
    cut = without_waiting([slow, fast], Mesh(ParallelPlan(dp_shard=2)))
    assert cut[0].events[0].start_s == pytest.approx(0.8)
    assert cut[1].events[0].start_s == pytest.approx(0.7)  # 0.8 on its partner's clock
    assert cut[1].events[0].end_s == 0.8


def test_a_receive_begins_when_its_message_was_sent() -> None:
    sender = StepTrace(0.0, 1.0, (event(0, "SEND_F(0,2)", "pp_comm", 0.5, 0.51),))
    receiver = StepTrace(0.0, 1.0, (event(1, "RECV_F(1,2)", "pp_comm", 0.1, 0.6),))
    back = StepTrace(0.0, 1.0, (event(1, "SEND_B(1,0)", "pp_comm", 0.3, 0.31),))
    waits = StepTrace(0.0, 1.0, (event(0, "RECV_B(0,0)", "pp_comm", 0.2, 0.4),))
    mesh = Mesh(ParallelPlan(pp=2))
    assert without_waiting([sender, receiver], mesh)[1].events[0].start_s == 0.5
    assert without_waiting([waits, back], mesh)[0].events[0].start_s == 0.3


def test_partners_are_those_of_the_same_group() -> None:
    mesh = Mesh(ParallelPlan(dp_shard=4, ep=2))  # expert groups 0-1 and 2-3
    starts = (0.1, 0.2, 0.7, 0.6)
    steps = [
        StepTrace(0.0, 1.0, (event(r, "ep_dispatch", "ep_comm", s, 0.9),))
        for r, s in enumerate(starts)
    ]
    cut = without_waiting(steps, mesh)
    assert [s.events[0].start_s for s in cut] == [0.2, 0.2, 0.7, 0.7]


def test_the_clip_norm_waits_for_every_stage() -> None:
    steps = [
        StepTrace(0.0, 1.0, (event(r, "clip_norm", "dp_comm", s, 0.9),))
        for r, s in enumerate((0.1, 0.8))
    ]
    cut = without_waiting(steps, Mesh(ParallelPlan(pp=2)))
    assert [s.events[0].start_s for s in cut] == [0.8, 0.8]
