"""Engines that jump from completion to completion against a loop over single tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.simulator.rollouts.layouts_fleet import Fleet, check_contexts
from flopwright.simulator.rollouts.layouts_generation import Generation, generate
from flopwright.simulator.rollouts.layouts_routing import equal_loads
from flopwright.simulator.rollouts.layouts_work import Work
from flopwright.spec.rollouts.engine import EngineModel, PrefillTable, Speculation, StepTable
from flopwright.spec.rollouts.layout import Fleet as FleetSpec


def _engine(
    a: float = 0.01,
    c: float = 1e-4,
    kappa: float = 1e-6,
    capacity: int | None = None,
    running: int = 64,
    per_token: float = 0.0,
) -> EngineModel:
    return EngineModel(
        decode=StepTable.linear(a, c, kappa),
        prefill=PrefillTable(per_token=per_token),
        kv_capacity_tokens=capacity,
        max_running=running,
    )


def _token_loop(
    engine: EngineModel, prompt: int, lengths: list[int], watermark: float = 0.01
) -> tuple[list[float], int]:
    """Returns (finish times, preemptions): one step after the other, the same policy."""
    capacity = math.inf if engine.kv_capacity_tokens is None else engine.kv_capacity_tokens
    now, preempted = 0.0, 0
    made = [0] * len(lengths)
    finish = [math.nan] * len(lengths)
    waiting, running = list(range(len(lengths))), []

    def used() -> int:
        return sum(prompt + made[r] for r in running)

    def admit() -> None:
        nonlocal now
        while waiting and len(running) < (engine.running_limit or 10**9):
            need = prompt + made[waiting[0]]
            if used() + need > (capacity * (1 - watermark) if running else capacity):
                return
            now += engine.prefill.work_seconds(need)
            running.append(waiting.pop(0))

    admit()
    while running:
        while used() + len(running) > capacity and len(running) > 1:
            waiting.insert(0, running.pop())
            preempted += 1
        now += engine.decode.seconds(len(running), used())
        for r in running:
            made[r] += 1
        done = [r for r in running if made[r] == lengths[r]]
        for r in done:
            finish[r] = now
            running.remove(r)
        if done:
            admit()
    return finish, preempted


def _run(engine: EngineModel, prompt: int, lengths: list[int]) -> tuple[list[float], int]:
    work = Work([prompt] * len(lengths), list(lengths), list(range(len(lengths))))
    fleet = Fleet(engine, 1, work)
    fleet.give(0, list(range(len(lengths))), 0.0)

    def done(at_s: float, index: int, ids: list[int]) -> None:
        for rid in ids:
            work.finish_s[rid] = at_s

    fleet.run(done)
    assert work.tokens == lengths
    return work.finish_s, fleet.servers[0].preempted


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    prompt=st.integers(0, 20),
    running=st.integers(1, 12),
    capacity=st.integers(85, 400) | st.none(),
    kappa=st.sampled_from([0.0, 1e-5]),
    per_token=st.sampled_from([0.0, 1e-3]),
)
def test_a_server_is_a_loop_over_tokens(
    lengths: list[int],
    prompt: int,
    running: int,
    capacity: int | None,
    kappa: float,
    per_token: float,
) -> None:
    engine = _engine(kappa=kappa, capacity=capacity, running=running, per_token=per_token)
    expected, preempted = _token_loop(engine, prompt, lengths)
    found, times = _run(engine, prompt, lengths)
    assert found == pytest.approx(expected, rel=1e-9)
    assert times == preempted


def test_without_limits_a_phase_is_the_exact_identity() -> None:
    """T = a R + c sum(l) + kappa sum(l p + l (l - 1) / 2) of rollouts.md, 6.2."""
    lengths = [7, 19, 40, 40, 3]
    found, _ = _run(_engine(a=0.02, c=3e-4, kappa=2e-6), 11, lengths)
    pairs = sum(n * 11 + n * (n - 1) / 2 for n in lengths)
    assert max(found) == pytest.approx(0.02 * 40 + 3e-4 * sum(lengths) + 2e-6 * pairs, rel=1e-12)


def test_speculation_divides_steps_by_its_tokens() -> None:
    engine = _engine(a=0.01, c=0.0, kappa=0.0).model_copy(
        update={"speculation": Speculation(drafts=3, acceptance=1.0)}
    )
    assert max(_run(engine, 0, [400])[0]) == pytest.approx(0.01 * 100)


def test_a_context_beyond_the_cache_is_refused_with_what_would_fit() -> None:
    engine = _engine(capacity=100)
    check_contexts(engine, 100)
    with pytest.raises(InputError, match="101") as caught:
        check_contexts(engine, 101)
    assert "lengths.cap below 100" in str(caught.value)


LENGTHS = np.random.default_rng(3).integers(5, 400, size=(24, 4)).astype(np.int64)


def _phase(routing: str, instances: int = 4, **engine: int) -> Generation:
    made = _engine(a=0.01, c=1e-5, kappa=0.0, **engine)
    spec = FleetSpec(engine=made, instances=instances, routing=routing, chunk_tokens=64)  # type: ignore[arg-type]
    return generate(spec, 3, LENGTHS)


@pytest.mark.parametrize(
    "routing",
    [
        "group_round_robin",
        "group_equal_tokens",
        "request_equal_tokens",
        "dedicated_long",
        "isolated_groups",
        "pooled",
        "pooled_longest_first",
        "least_loaded",
    ],
)
def test_every_routing_completes_every_response_inside_grahams_bounds(routing: str) -> None:
    phase = _phase(routing, running=4)
    assert np.isfinite(phase.finish_s).all()
    step = 0.01 + 4 * 1e-5
    work, longest = LENGTHS.sum() / 16, LENGTHS.max()
    assert phase.seconds >= 0.01 * max(work, longest)
    if routing == "pooled":  # work-conserving over all slots, up to one piece
        assert phase.seconds <= step * (work + longest + 64)


def test_where_tokens_alone_cost_time_known_tokens_beat_turns() -> None:
    engine = _engine(a=0.0, c=1e-3, kappa=0.0)
    seconds = []
    for routing in ("request_equal_tokens", "group_equal_tokens", "group_round_robin"):
        spec = FleetSpec(engine=engine, instances=4, routing=routing)  # type: ignore[arg-type]
        seconds.append(generate(spec, 0, LENGTHS).seconds)
    assert seconds == sorted(seconds)
    assert seconds[0] == pytest.approx(LENGTHS.sum() / 4 * 1e-3, rel=0.01)


def test_pieces_through_a_shared_cache_prefill_each_prompt_once() -> None:
    assert _phase("pooled").prefilled_tokens == LENGTHS.size * 3
    assert _phase("pooled").preempted == 0


def test_equal_loads_are_within_four_thirds_of_the_mean_bound() -> None:
    """Graham's longest-first: (4/3 - 1/(3m)) OPT, and OPT is at least mean and maximum."""
    loads = LENGTHS.sum(axis=1)
    where = equal_loads(loads, 5)
    most = max(int(loads[where == i].sum()) for i in range(5))
    assert most <= (4 / 3 - 1 / 15) * max(loads.sum() / 5, loads.max())
