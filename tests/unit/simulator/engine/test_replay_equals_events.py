"""The replayed longest path equals the event engine on drawn plans, to 1e-9."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.plan.lower import lower
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.simulator.engine.engine import Engine
from flopwright.simulator.engine.pipeline import run_step
from flopwright.simulator.training.program import merge, program_of
from flopwright.simulator.training.replay import Durations, replay, replay_step_seconds


@st.composite
def cases(draw: st.DrawFn) -> tuple[ParallelPlan, int, Durations]:
    """Draws a plan, a number of micro-batches and random durations."""
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b"]))
    pp = draw(st.integers(1, 8))
    vpp = draw(st.integers(2, 3)) if schedule == "interleaved_1f1b" else 1
    rounds = draw(st.integers(1, 4))
    m = rounds * pp if vpp > 1 else draw(st.integers(1, 16))
    plan = ParallelPlan(pp=pp, vpp=vpp, schedule=schedule, dp_shard=draw(st.sampled_from([1, 2])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    hop = draw(st.sampled_from([0.0, 0.1, 2.0]))
    return plan, m, _durations(rng, pp, vpp, hop)


def _durations(
    rng: np.random.Generator, pp: int, vpp: int, hop: float, columns: tuple[int, ...] = ()
) -> Durations:
    chunks = pp * vpp
    return Durations(
        forward_s=rng.exponential(1.0, (chunks, *columns)),
        backward_s=rng.exponential(2.0, (chunks, *columns)),
        send_s=hop * rng.exponential(1.0, (chunks, *columns)),
        reduce_s=rng.exponential(1.0, (pp, *columns)),
        step_s=rng.exponential(0.1, (pp, *columns)),
        norm_s=rng.exponential(0.01, columns) if columns else 0.01,
    )


@settings(max_examples=80, deadline=None)
@given(cases())
def test_every_action_has_the_same_times(case: tuple[ParallelPlan, int, Durations]) -> None:
    plan, m, durations = case
    program = program_of(plan, m)
    timeline = replay(program, durations)
    run = run_step(lower(plan, m), durations)
    assert float(timeline.step_time_s) == pytest.approx(run.step_time_s, abs=1e-9)
    events = {(stage, action): (start, end) for stage, action, start, end in run.records}
    assert len(events) == len(program.entries)
    for i, entry in enumerate(program.entries):
        start, end = events[entry.stage, entry.action]
        assert timeline.start_s[i] == pytest.approx(start, abs=1e-9)
        assert timeline.end_s[i] == pytest.approx(end, abs=1e-9)


@pytest.mark.parametrize(("schedule", "vpp"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)])
def test_vectors_replay_like_their_columns(schedule: str, vpp: int) -> None:
    rng = np.random.default_rng(1)
    plan = ParallelPlan(pp=4, vpp=vpp, schedule=schedule, dp_shard=2)
    many = _durations(rng, 4, vpp, 0.3, (5,))
    program = program_of(plan, 8)
    together = replay(program, many)
    assert replay_step_seconds(program, many) == pytest.approx(together.step_time_s, abs=1e-12)
    for column in range(5):
        one = Durations(
            forward_s=many.forward_s[:, column],
            backward_s=many.backward_s[:, column],
            send_s=many.send_s[:, column],
            reduce_s=many.reduce_s[:, column],
            step_s=many.step_s[:, column],
            norm_s=np.asarray(many.norm_s)[column],
        )
        assert replay(program, one).end_s == pytest.approx(together.end_s[:, column], abs=1e-12)


def test_a_shared_link_can_only_delay() -> None:
    rng = np.random.default_rng(2)
    plan = ParallelPlan(pp=4, dp_shard=2)
    durations = _durations(rng, 4, 1, 1.0)
    private = run_step(lower(plan, 8), durations)
    shared = run_step(lower(plan, 8), durations, link_name=lambda *_: "one switch")
    assert shared.step_time_s > private.step_time_s
    wide = run_step(lower(plan, 8), durations, lambda *_: "one switch", link_capacity=64)
    assert wide.step_time_s <= private.step_time_s + 1e-9


def test_lists_that_wait_for_each_other_are_refused() -> None:
    deadlocked = (
        (Action(ActionKind.RECV_BACKWARD, 0, 0, 1), Action(ActionKind.SEND_FORWARD, 0, 0, 1)),
        (Action(ActionKind.RECV_FORWARD, 1, 0, 0), Action(ActionKind.SEND_BACKWARD, 1, 0, 0)),
    )
    with pytest.raises(ValueError, match="wait for each other"):
        merge(deadlocked)


def test_ties_happen_in_the_order_of_asking() -> None:
    seen: list[str] = []
    engine = Engine(lambda name, start, end: seen.append(f"{name} {start:g}-{end:g}"))

    def work(name: str):
        start = engine.now_s
        yield engine.wait(1.0)
        engine.record(name, start)

    for name in "cab":
        engine.start(work(name))
    engine.run()
    assert seen == ["c 0-1", "a 0-1", "b 0-1"]
