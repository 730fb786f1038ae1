"""Steps in waves take what the replay of the whole lowered list takes, whatever the schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.placement import CHUNKS_PER_STAGE, in_rounds
from flopwright.simulator.training.candidates import SCHEDULES
from flopwright.simulator.training.program import program_of
from flopwright.simulator.training.replay import Durations, replay_step_seconds
from flopwright.simulator.training.waves import many_step_seconds, waves_of


@st.composite
def plans(draw: st.DrawFn) -> tuple[ParallelPlan, int]:
    schedule = draw(st.sampled_from(SCHEDULES))
    least, most = CHUNKS_PER_STAGE[schedule]
    vpp = draw(st.integers(max(least, 1), most or 3))
    pp = draw(st.integers(1, 5))
    m = draw(st.integers(1, 4)) * (pp if in_rounds(schedule, vpp) else 1)
    if schedule == "dualpipe_v":
        m += 2 * pp
    axes: dict[str, Any] = {"dp_shard": draw(st.sampled_from((1, 2)))}
    axes["zero_stage"] = draw(st.integers(0, 3)) if pp == 1 else draw(st.integers(0, 1))
    axes["data_parallel"] = draw(st.sampled_from(("deepspeed", "fsdp2", "none")))
    axes["recompute"] = draw(st.sampled_from(("none", "full")))
    return ParallelPlan(schedule=schedule, pp=pp, vpp=vpp, **axes), m


def durations(plan: ParallelPlan, seed: int, columns: int = 3) -> Durations:
    rng = np.random.default_rng(seed)
    chunks = (plan.num_chunks, columns)

    def some(rows: int, high: float = 1.0) -> Any:
        return rng.uniform(0, high, (rows, columns))

    send = some(plan.num_chunks, 0.4)
    send[-1] = 0.0
    again = some(plan.num_chunks, 0.3) * (plan.recompute != "none")
    weight, exchange = some(plan.num_chunks), some(plan.num_chunks, 0.5)
    return Durations(
        forward_s=some(plan.num_chunks) + exchange,
        backward_s=rng.uniform(0, 2, chunks) + weight + exchange + again,
        send_s=send,
        reduce_s=some(plan.pp),
        step_s=some(plan.pp),
        norm_s=rng.uniform(0, 1, columns),
        weight_s=weight,
        recompute_s=again,
        forward_exchange_s=exchange,
        backward_exchange_s=exchange,
    )


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(0, 2**31))
def test_waves_take_what_the_replay_takes(drawn: tuple[ParallelPlan, int], seed: int) -> None:
    plan, m = drawn
    of = durations(plan, seed)
    batch = m * plan.micro_batch_size * plan.dp
    expected = replay_step_seconds(program_of(plan, m), of)
    np.testing.assert_allclose(many_step_seconds(plan, of, batch), expected, rtol=1e-12)


def test_copies_to_the_host_that_take_no_time_change_nothing() -> None:
    plan = ParallelPlan(pp=3, dp_shard=2, recompute="full", activation_offload=True)
    of = durations(plan, 0)
    expected = replay_step_seconds(program_of(plan, 7), of)
    np.testing.assert_allclose(many_step_seconds(plan, of, 14), expected, rtol=1e-12)


def test_every_unit_runs_once_and_no_stage_twice_in_a_wave() -> None:
    found = waves_of("interleaved_1f1b", 4, 2, 8)
    rows = np.concatenate([w.row for w in found.waves])
    assert len(rows) == 2 * 4 * 2 * 8
    assert all(len(set(w.stage.tolist())) == len(w.stage) for w in found.waves)
    assert len(found.waves) < len(rows) / 2  # stages run side by side


def test_one_hop_fewer_makes_a_shorter_step() -> None:
    """The comparison above can fail: the seconds of every hop count."""
    plan = ParallelPlan(pp=4, dp_shard=2)
    of = durations(plan, 1)
    before = many_step_seconds(plan, of, 2 * 6)
    of.send_s[:] = 0.0
    assert (many_step_seconds(plan, of, 2 * 6) < before).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lists_that_wait_for_each_other_are_refused(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flopwright.simulator.training import waves

    def reversed_lists(name: Any, pp: int, vpp: int, stage: int, m: int) -> Any:
        listed = original(name, pp, vpp, stage, m)
        return tuple(a._replace(overlaps=False) for a in (listed if stage else listed[::-1]))

    original = waves.stage_actions
    monkeypatch.setattr(waves, "stage_actions", reversed_lists)
    vpp = max(1, CHUNKS_PER_STAGE[schedule][0])  # type: ignore[index]
    with pytest.raises(ValueError, match="wait for each other"):
        waves.waves_of.__wrapped__(schedule, 2, vpp, 8)
