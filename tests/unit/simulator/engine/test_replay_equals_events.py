"""The replayed longest path equals the event engine on drawn plans, to 1e-9."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.plan.schedules.placement import (
    CHUNKS_PER_STAGE,
    fewest_microbatches,
    in_rounds,
)
from flopwright.simulator.engine.engine import Engine
from flopwright.simulator.engine.pipeline import run_step
from flopwright.simulator.training.durations import Disturbance, Durations
from flopwright.simulator.training.program import Program, merge, program_of
from flopwright.simulator.training.replay import replay, replay_step_seconds


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[ParallelPlan, int]:
    """Draws a plan of any schedule and a number of micro-batches it can run."""
    schedule = draw(st.sampled_from(sorted(CHUNKS_PER_STAGE)))
    least, most = CHUNKS_PER_STAGE[schedule]
    vpp = draw(st.integers(least, most or 3))
    pp = draw(st.integers(1, 8 if vpp == 1 else 5))
    fewest = fewest_microbatches(schedule, pp)
    rounds = draw(st.integers(1, 3))
    m = rounds * pp if in_rounds(schedule, vpp) else fewest + draw(st.integers(0, 12))
    plan = ParallelPlan(
        pp=pp,
        vpp=vpp,
        schedule=schedule,
        dp_shard=draw(st.sampled_from([1, 4])),
        zero_stage=draw(st.sampled_from([0, 1, 3])),
        data_parallel=draw(st.sampled_from(["deepspeed", "fsdp2"])),
        recompute=draw(st.sampled_from(["none", "full"])),
        activation_offload=draw(st.booleans()),
    )
    return plan, m


@st.composite
def cases(draw: st.DrawFn) -> tuple[ParallelPlan, int, Durations]:
    """Draws a plan, its micro-batches and random durations: uneven stages and hops."""
    plan, m = draw(pipelines())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    hop = draw(st.sampled_from([0.0, 0.1, 2.0]))
    return plan, m, random_durations(rng, plan.pp, plan.vpp, hop)


def random_durations(
    rng: np.random.Generator, pp: int, vpp: int, hop: float, columns: tuple[int, ...] = ()
) -> Durations:
    """Returns seconds for every kind of action."""
    chunks = (pp * vpp, *columns)
    forward, backward = rng.exponential(1.0, chunks), rng.exponential(2.0, chunks)
    step = rng.exponential(0.1, (pp, *columns))
    comm = {
        "forward_comm_s": 0.0 * forward,
        "backward_comm_s": 0.1 * rng.uniform(0, 1) * backward,
        "step_comm_s": 0.7 * step,
    }
    return Durations(
        forward_s=forward,
        backward_s=backward,
        send_s=hop * rng.exponential(1.0, chunks),
        reduce_s=rng.exponential(1.0, (pp, *columns)),
        step_s=step,
        norm_s=rng.exponential(0.01, columns) if columns else 0.01,
        weight_s=0.4 * backward,
        recompute_s=0.2 * backward,
        forward_exchange_s=rng.uniform(0, 1) * forward,
        backward_exchange_s=0.3 * rng.uniform(0, 1) * backward,
        **comm,
        offload_s=rng.exponential(1.0, chunks),
        fetch_s=rng.exponential(1.0, chunks),
        gather_s=rng.exponential(0.3, chunks),
    )


def disturbed(
    rng: np.random.Generator, program: Program, replicas: int, group: int
) -> Disturbance:
    """Returns random factors of two samples."""
    places = [sum(c.stage == s for c in program.codes) for s in range(program.num_stages)]
    return Disturbance(
        factors=tuple(rng.uniform(0.5, 2.0, (n, 2, replicas)) for n in places),
        links=rng.uniform(1.0, 2.0, (program.num_stages, replicas)),
        group=group,
    )


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(cases())
def test_every_action_has_the_same_times(case: tuple[ParallelPlan, int, Durations]) -> None:
    plan, m, durations = case
    program = program_of(plan, m)
    timeline = replay(program, durations)
    run = run_step(program, durations, replicas=plan.dp)
    assert run.replicas == 1, "replicas that nothing tells apart are one"
    assert float(timeline.step_time_s) == pytest.approx(run.step_time_s, abs=1e-9)
    assert run.start_s[0] == pytest.approx(timeline.start_s, abs=1e-9)
    assert run.end_s[0] == pytest.approx(timeline.end_s, abs=1e-9)
    assert float(replay_step_seconds(program, durations)) == pytest.approx(
        run.step_time_s, abs=1e-9
    )


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from([1, 2, 4]), st.integers(0, 2**32 - 1))
def test_ranks_that_differ_have_the_same_times(
    case: tuple[ParallelPlan, int, Durations], group: int, seed: int
) -> None:
    plan, m, durations = case
    program = program_of(plan, m)
    disturbance = disturbed(np.random.default_rng(seed), program, 4, group)
    timeline = replay(program, durations, disturbance)
    steps = replay_step_seconds(program, durations, disturbance)
    for sample in range(2):
        run = run_step(program, durations, disturbance=disturbance, sample=sample)
        assert run.step_time_s == pytest.approx(steps[sample], abs=1e-9)
        start, end = timeline.start_s[:, sample], timeline.end_s[:, sample]
        assert np.abs(run.start_s.T - start).max() < 1e-9
        assert np.abs(run.end_s.T - end).max() < 1e-9


@settings(max_examples=20, deadline=None)
@given(pipelines())
def test_vectors_replay_like_their_columns(case: tuple[ParallelPlan, int]) -> None:
    plan, m = case
    many = random_durations(np.random.default_rng(1), plan.pp, plan.vpp, 0.3, (3,))
    program = program_of(plan, m)
    together = replay(program, many)
    assert replay_step_seconds(program, many) == pytest.approx(together.step_time_s, abs=1e-12)
    for column in range(3):
        fields = {n: np.asarray(getattr(many, n))[..., column] for n in many.__slots__}
        one = Durations(**fields)
        assert replay(program, one).end_s == pytest.approx(together.end_s[:, column], abs=1e-12)


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
