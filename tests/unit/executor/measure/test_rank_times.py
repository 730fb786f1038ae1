"""Busy seconds by rank and link: waiting is left out, links are known from both ends."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from flopwright.executor.measure.rank_times import link_times, rank_metrics
from flopwright.executor.measure.timers import StepTrace
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.trace import TraceEvent


def event(rank: int, name: str, cls: str, start: float, end: float) -> TraceEvent:
    stream = "comm" if cls.endswith("comm") else "compute"
    return TraceEvent(rank, stream, name, cls, start, end, 100 if stream == "comm" else 0)


def pipeline_step(send_s: float = 1.0) -> tuple[StepTrace, ...]:
    """Two stages; the second waits for the first one's activations."""
    first = (
        event(0, "F(0,0)", "forward", 0.0, 2.0),
        event(0, "SEND_F(0,0)", "pp_comm", 2.0, 2.0),
        event(0, "RECV_B(0,0)", "pp_comm", 2.0, 7.0 + send_s),
        event(0, "B(0,0)", "backward", 7.0 + send_s, 9.0 + send_s),
    )
    second = (
        event(1, "RECV_F(1,0)", "pp_comm", 0.0, 2.0 + send_s),
        event(1, "F(1,0)", "forward", 2.0 + send_s, 4.0 + send_s),
        event(1, "SEND_B(1,0)", "pp_comm", 6.5, 6.5),
    )
    return StepTrace(0.0, 10.0, first), StepTrace(0.0, 10.0, second)


def test_a_message_is_its_receivers_from_when_it_was_sent() -> None:
    mesh = Mesh(ParallelPlan(pp=2))
    steps = [pipeline_step(), pipeline_step(), pipeline_step(5.0)]
    links = {(x.cls, x.ranks): x for x in link_times(steps, mesh)}
    assert set(links) == {("pp_comm", (0, 1)), ("pp_comm", (1, 0))}
    forward = links["pp_comm", (0, 1)]
    # from the send at 2 to the arrival at 3; the median over steps
    assert (forward.seconds, forward.nbytes, forward.count) == (pytest.approx(1.0), 100, 1)
    ranks = rank_metrics(steps, mesh)
    assert [(r.rank, r.stage) for r in ranks] == [(0, 0), (1, 1)]
    assert ranks[0].time_s["forward"] == pytest.approx(2.0)
    assert ranks[1].time_s["pp_comm"] == pytest.approx(1.0)


def test_of_a_collective_the_slowest_member_counts() -> None:
    mesh = Mesh(ParallelPlan(dp_shard=2))
    early = StepTrace(0.0, 5.0, (event(0, "REDUCE_GRAD", "dp_comm", 1.0, 5.0),))
    late = StepTrace(0.0, 5.0, (event(1, "REDUCE_GRAD", "dp_comm", 3.0, 4.5),))
    (link,) = link_times([(early, late)], mesh)
    # both are there at 3; rank 0 has it at 5
    assert (link.cls, link.ranks, link.seconds) == ("dp_comm", (0, 1), pytest.approx(2.0))
    ranks = rank_metrics([(early, late)], mesh)
    assert ranks[0].time_s["dp_comm"] == pytest.approx(2.0)
    assert ranks[1].time_s["dp_comm"] == pytest.approx(1.5)
