"""Exposed classes and idle sum to the step, and compute hides communication."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.report.attribution import exposed_time
from flopwright.report.metrics import TIME_CLASSES
from flopwright.report.trace import TraceEvent, chrome_trace, kineto_traces

CLASSES = [c for c in TIME_CLASSES if c != "idle"]
EVENT = st.builds(
    lambda cls, start, length: TraceEvent(0, "compute", cls, cls, start, start + length),
    st.sampled_from(CLASSES),
    st.floats(0, 10),
    st.floats(0, 3),
)


@given(st.lists(EVENT, max_size=30), st.floats(1, 15))
@settings(max_examples=300, deadline=None)
def test_classes_and_idle_sum_to_the_step(events: list[TraceEvent], step: float) -> None:
    parts = exposed_time(events, 0, step)
    assert math.isclose(sum(parts.values()), step, rel_tol=1e-9)
    assert all(v >= 0 for v in parts.values())


def test_hidden_communication_is_not_counted() -> None:
    events = [
        TraceEvent(0, "compute", "F", "forward", 0.0, 2.0),
        TraceEvent(0, "comm", "reduce", "dp_comm", 1.0, 3.0),
        TraceEvent(1, "compute", "F", "forward", 0.0, 9.0),
    ]
    assert exposed_time(events, 0, 4.0) == {"forward": 2.0, "dp_comm": 1.0, "idle": 1.0}


def test_chrome_trace_has_one_slice_an_event_in_microseconds() -> None:
    data = chrome_trace(
        [TraceEvent(3, "comm", "SEND_F(0,1)", "pp_comm", 0.5, 0.75, 1024)], world_size=4
    )
    (slice_,) = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert (slice_["pid"], slice_["ts"], slice_["dur"]) == (3, 0.5e6, 0.25e6)
    assert data["distributedInfo"]["world_size"] == 4


def test_what_overlaps_stands_on_streams_of_its_own() -> None:
    """A viewer takes overlapping slices of one stream for nested ones."""
    events = [
        TraceEvent(0, "comm", "RECV_F(1,1)", "pp_comm", 0.0, 2.0),
        TraceEvent(0, "comm", "REDUCE_GRAD(1)", "dp_comm", 1.0, 3.0),
        TraceEvent(0, "comm", "RECV_F(1,2)", "pp_comm", 2.0, 4.0),
        TraceEvent(0, "copy", "OFFLOAD(1,1)", "offload", 0.0, 2.0),
        TraceEvent(0, "copy", "FETCH(1,0)", "offload", 1.0, 3.0),
        TraceEvent(1, "comm", "RECV_F(2,0)", "pp_comm", 1.0, 3.0),
    ]
    rows = [e for e in chrome_trace(events, world_size=2)["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["tid"]) for e in rows] == [
        (0, 20), (0, 21), (0, 20), (0, 30), (0, 31), (1, 20),
    ]  # fmt: skip
    kernels = kineto_traces(events, world_size=2)[0]["traceEvents"]
    assert [k["tid"] for k in kernels] == [20, 21, 20, 30, 31]
    assert [k["args"]["stream"] for k in kernels] == [20, 21, 20, 30, 31]
