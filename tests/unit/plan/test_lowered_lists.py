"""Lowered lists: every receive has its send, nothing deadlocks, memory bounds hold."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.plan.lower import lower, units
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import COMPUTE_KINDS, Action, ActionKind
from flopwright.plan.schedules.in_flight import max_in_flight
from flopwright.plan.schedules.placement import (
    CHUNKS_PER_STAGE,
    chunks_of_stage,
    fewest_microbatches,
    in_rounds,
    stage_of_chunk,
)
from flopwright.plan.schedules.registry import compute_actions

Lists = tuple[tuple[Action, ...], ...]

SENDS = {
    ActionKind.SEND_FORWARD: ActionKind.RECV_FORWARD,
    ActionKind.SEND_BACKWARD: ActionKind.RECV_BACKWARD,
}
F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[ParallelPlan, int]:
    """Draws (plan, micro-batches) of every schedule."""
    schedule = draw(st.sampled_from(sorted(CHUNKS_PER_STAGE)))
    least, most = CHUNKS_PER_STAGE[schedule]
    pp, vpp = draw(st.integers(1, 8)), draw(st.integers(least, most or 4))
    if in_rounds(schedule, vpp):
        m = pp * draw(st.integers(1, 4))
    else:
        m = draw(st.integers(fewest_microbatches(schedule, pp), 24))
    return ParallelPlan(pp=pp, vpp=vpp, schedule=schedule), m


def run_all(plan: ParallelPlan, lists: Lists, order: random.Random) -> list[int]:
    """Runs the lists with asynchronous sends and blocking receives; returns in-flight maxima.

    Ranks take turns in random order. Messages of one direction between two ranks arrive in
    the order they were sent, and a receive takes the next one: it must be the one it names.
    """
    position = [0] * len(lists)
    pipes: dict[tuple[ActionKind, int, int], deque[tuple[int, int]]] = defaultdict(deque)
    done: set[tuple[ActionKind, int, int]] = set()
    live, peak = [0] * len(lists), [0] * len(lists)
    while True:
        able = [
            r for r, a in enumerate(lists) if position[r] < len(a) and _can(r, a, position, pipes)
        ]
        if not able:
            break
        rank = order.choice(able)
        a = lists[rank][position[rank]]
        position[rank] += 1
        if a.kind in SENDS:
            step = 1 if a.kind is ActionKind.SEND_FORWARD else -1
            pipes[SENDS[a.kind], rank, a.peer].append((a.chunk + step, a.microbatch))
        elif a.kind in SENDS.values():
            assert pipes[a.kind, a.peer, rank].popleft() == (a.chunk, a.microbatch)
            done.add((a.kind, a.chunk, a.microbatch))
        elif a.kind in COMPUTE_KINDS:
            _compute(plan, rank, a, done)
            live[rank] += {F: 1, B: -1, W: -1}.get(a.kind, 0)
            peak[rank] = max(peak[rank], live[rank])
    assert position == [len(actions) for actions in lists], "deadlock"
    assert not any(pipes.values()), "a message that nobody takes"
    return peak


def _can(rank: int, actions: tuple[Action, ...], position: list[int], pipes: Any) -> bool:
    a = actions[position[rank]]
    return a.kind not in SENDS.values() or bool(pipes[a.kind, a.peer, rank])


def _compute(plan: ParallelPlan, rank: int, a: Action, done: set[Any]) -> None:
    """Runs a compute action once all that it needs is there."""
    key = (a.chunk, a.microbatch)
    assert stage_of_chunk(plan, a.chunk) == rank
    assert (a.kind, *key) not in done
    if a.kind is F:
        needs = a.chunk == 0 or (ActionKind.RECV_FORWARD, *key) in done
        assert needs or _beside(plan, rank, (F, a.chunk - 1, a.microbatch), done)
    elif a.kind is W:
        assert (I, *key) in done
    else:
        assert (F, *key) in done
        needs = a.chunk == plan.num_chunks - 1 or (ActionKind.RECV_BACKWARD, *key) in done
        above = (a.chunk + 1, a.microbatch)
        assert needs or any(_beside(plan, rank, (k, *above), done) for k in (B, I))
    done.add((a.kind, *key))


def _beside(plan: ParallelPlan, rank: int, what: tuple[ActionKind, int, int], done: Any) -> bool:
    return what in done and stage_of_chunk(plan, what[1]) == rank


@pytest.mark.slow
@given(pipelines(), st.randoms(use_true_random=False))
@settings(max_examples=400, deadline=None)
def test_every_schedule_runs_and_keeps_its_memory_bound(case: Any, order: random.Random) -> None:
    plan, m = case
    peak = run_all(plan, lower(plan, m), order)
    assert peak == [max_in_flight(plan, s, m) for s in range(plan.pp)]


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_the_memory_bounds_are_those_of_the_papers(pp: int) -> None:
    """In units of a stage's activations for one micro-batch: 1F1B's first stage holds pp."""
    m = 4 * pp

    def held(schedule: str, vpp: int) -> list[float]:
        plan = ParallelPlan(pp=pp, vpp=vpp, schedule=schedule)
        return [max_in_flight(plan, s, m) / vpp for s in range(pp)]

    assert held("1f1b", 1) == [pp - s for s in range(pp)]
    assert held("zb_h1", 1) == held("zb_v", 2) == [pp] * pp  # arXiv 2401.10241, table 1
    # PP + 1 chunks of the PP = 2 pp that DualPipe counts, its README.
    assert held("dualpipe_v", 2) == [pp + 0.5] * pp


@given(pipelines())
@settings(max_examples=100, deadline=None)
def test_each_microbatch_passes_each_chunk_once(case: tuple[ParallelPlan, int]) -> None:
    plan, m = case
    actions = [a for rank in lower(plan, m) for a in rank]
    every = [(c, i) for c in range(plan.num_chunks) for i in range(m)]
    for kinds in ({F}, {B, I}, {B, W}):
        assert sorted((a.chunk, a.microbatch) for a in actions if a.kind in kinds) == every


@given(pipelines())
@settings(max_examples=100, deadline=None)
def test_pairs_are_a_forward_and_a_backward_of_other_work(case: tuple[ParallelPlan, int]) -> None:
    plan, m = case
    for actions in compute_actions(plan, m):
        pairs = [u for u in units(actions) if len(u) == 2]
        for forward, backward in pairs:
            assert (forward.kind, backward.kind) == (F, B)
            assert forward.microbatch != backward.microbatch
        if plan.schedule == "dualpipe_v" and m > 2 * plan.pp:
            assert len(pairs) >= 2
        if plan.schedule == "interleaved_1f1b_overlap" and m > 2 * plan.pp:
            assert pairs


def test_the_overlapping_schedule_runs_one_forward_more_first() -> None:
    """Kimi K2 (arXiv 2507.20534, 2.4): the last stage's pairs, too, are of two micro-batches."""
    for stage in range(4):
        plain, more = (
            compute_actions(ParallelPlan(pp=4, vpp=2, schedule=s), 8)[stage]
            for s in ("interleaved_1f1b", "interleaved_1f1b_overlap")
        )
        first = [next(i for i, a in enumerate(x) if a.kind is B) for x in (plain, more)]
        assert first[1] == first[0] + 1


def test_a_v_comes_back_to_the_first_stage() -> None:
    plan = ParallelPlan(pp=4, vpp=2, schedule="zb_v")
    assert [stage_of_chunk(plan, c) for c in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [chunks_of_stage(plan, s) for s in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    uneven = plan.model_copy(update={"layers_per_stage": (1, 2, 3, 4, 5, 6, 7, 8)})
    assert [len(layers) for layers in uneven.stage_layers(36)] == [9, 9, 9, 9]
    assert uneven.stage_layers(36)[0] == (0, *range(28, 36))
    looped = ParallelPlan(pp=4, vpp=2, schedule="interleaved_1f1b")
    assert [stage_of_chunk(looped, c) for c in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def _kinds(actions: tuple[Action, ...]) -> set[ActionKind]:
    return {a.kind for a in actions}


def test_a_data_parallel_step_ends_with_reduction_and_optimizer() -> None:
    (only,) = lower(ParallelPlan(dp_shard=2), 2)
    assert [a.kind for a in only[-2:]] == [ActionKind.REDUCE_GRADIENTS, ActionKind.OPTIMIZER_STEP]
    (alone,) = lower(ParallelPlan(), 2)
    assert ActionKind.REDUCE_GRADIENTS not in _kinds(alone)


@pytest.mark.parametrize(
    ("plan", "reduces"),
    [
        ({"tp": 4, "ep": 2}, True),  # experts stand on two ranks each
        ({"tp": 4, "ep": 4}, True),  # norms saw a quarter of the tokens each
        ({"tp": 4, "ep": 4, "sequence_parallel": False}, False),
        ({"tp": 4, "ep": 2, "sequence_parallel": False}, True),
        ({"tp": 4, "ep": 2, "etp": 2, "sequence_parallel": False}, False),
        ({"cp": 2}, True),
    ],
)
def test_who_shares_weights_reduces(plan: dict[str, Any], reduces: bool) -> None:
    (only,) = lower(ParallelPlan(**plan), 2)
    assert (ActionKind.REDUCE_GRADIENTS in _kinds(only)) == reduces


@given(pipelines())
@settings(max_examples=60, deadline=None)
def test_a_recompute_stands_before_its_backward(case: tuple[ParallelPlan, int]) -> None:
    plan, m = case
    for actions in lower(plan.model_copy(update={"recompute": "full"}), m):
        again = [i for i, a in enumerate(actions) if a.kind is ActionKind.RECOMPUTE]
        for i in again:
            key = actions[i][1:3]
            (begins,) = (j for j, a in enumerate(actions) if a.kind in {B, I} and a[1:3] == key)
            between = actions[i + 1 : begins]
            assert not between or (len(between) == 1 and between[0].overlaps)
        assert len(again) == sum(a.kind in {B, I} for a in actions)


@given(pipelines())
@settings(max_examples=60, deadline=None)
def test_what_leaves_comes_back_one_action_early(case: tuple[ParallelPlan, int]) -> None:
    plan, m = case
    for actions in lower(plan.model_copy(update={"activation_offload": True}), m):
        place = {(a.kind, *a[1:3]): i for i, a in enumerate(actions)}
        left = {k[1:] for k in place if k[0] is ActionKind.OFFLOAD}
        assert left == {k[1:] for k in place if k[0] is ActionKind.FETCH}
        listed = list(units([a for a in actions if a.kind in COMPUTE_KINDS]))
        turn = {(a.kind, *a[1:3]): i for i, unit in enumerate(listed) for a in unit}
        for kind, *key in turn:
            if kind not in {B, I}:
                continue
            stays = turn[kind, *key] - turn[F, *key] <= 2
            assert (tuple(key) in left) != stays
            if stays:
                continue
            out, back = (place[k, *key] for k in (ActionKind.OFFLOAD, ActionKind.FETCH))
            assert place[F, *key] < out < back
            following = next(a for a in actions[back:] if a.kind in COMPUTE_KINDS)
            assert turn[following.kind, *following[1:3]] == turn[kind, *key] - 1


@pytest.mark.parametrize("parallel", ["deepspeed", "fsdp2"])
def test_zero_3_gathers_for_every_action_and_reduces_every_microbatch(parallel: str) -> None:
    plan = ParallelPlan(dp_shard=4, zero_stage=3, data_parallel=parallel)
    (only,) = lower(plan, 2, buckets=[2])
    shown = [str(a) for a in only]
    assert shown[:12] == [
        "GATHER_W(0,0)[0]", "GATHER_W(0,0)[1]", "F(0,0)",
        "GATHER_W(0,0)[1]", "GATHER_W(0,0)[0]", "B(0,0)",
        "REDUCE_GRAD(0,0)[1]", "REDUCE_GRAD(0,0)[0]",
        "GATHER_W(0,1)[0]", "GATHER_W(0,1)[1]", "F(0,1)", "GATHER_W(0,1)[1]",
    ]  # fmt: skip
    assert shown[-1] == "OPTIM"


def test_fsdp2_reduces_a_chunk_once_it_is_done() -> None:
    plan = ParallelPlan(
        pp=2, vpp=2, dp_shard=2, zero_stage=1, data_parallel="fsdp2", schedule="zb_v"
    )
    for actions in lower(plan, 4):
        gathers = [a for a in actions if a.kind is ActionKind.GATHER_WEIGHTS]
        reduces = [a for a in actions if a.kind is ActionKind.REDUCE_GRADIENTS]
        assert len(gathers) == len(reduces) == 2
        for a in reduces:
            last = max(i for i, w in enumerate(actions) if w.kind is W and w.chunk == a.chunk)
            assert actions[last + 1] == a
        for a in gathers:
            first = min(i for i, f in enumerate(actions) if f.kind is F and f.chunk == a.chunk)
            assert actions.index(a) < first
