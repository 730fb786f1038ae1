"""Lowered lists: every receive has its send, nothing deadlocks, memory bounds hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.plan.lower import lower
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import Action, ActionKind

SENDS = {
    ActionKind.SEND_FORWARD: ActionKind.RECV_FORWARD,
    ActionKind.SEND_BACKWARD: ActionKind.RECV_BACKWARD,
}


def run_all(plan: ParallelPlan, lists: tuple[tuple[Action, ...], ...]) -> list[int]:
    """Runs the lists with asynchronous sends and blocking receives; returns in-flight maxima."""
    position = [0] * len(lists)
    sent: set[tuple[ActionKind, int, int]] = set()
    done: set[tuple[str, int, int]] = set()
    live, peak = [0] * len(lists), [0] * len(lists)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(lists):
            while position[rank] < len(actions):
                a = actions[position[rank]]
                if a.kind in SENDS:
                    step = 1 if a.kind is ActionKind.SEND_FORWARD else -1
                    sent.add((SENDS[a.kind], a.chunk + step, a.microbatch))
                elif a.kind in SENDS.values() and (a.kind, a.chunk, a.microbatch) not in sent:
                    break
                elif a.kind is ActionKind.FORWARD:
                    if a.chunk > 0 and (a.chunk - 1) % plan.pp == rank:
                        assert ("F", a.chunk - 1, a.microbatch) in done
                    done.add(("F", a.chunk, a.microbatch))
                    live[rank] += 1
                    peak[rank] = max(peak[rank], live[rank])
                elif a.kind is ActionKind.BACKWARD:
                    assert ("F", a.chunk, a.microbatch) in done
                    done.add(("B", a.chunk, a.microbatch))
                    live[rank] -= 1
                position[rank] += 1
                progress = True
    assert position == [len(actions) for actions in lists], "deadlock"
    return peak


@given(st.integers(1, 8), st.integers(1, 16), st.sampled_from(["1f1b", "gpipe"]))
@settings(max_examples=150, deadline=None)
def test_plain_schedules_run_and_keep_their_memory_bound(pp: int, m: int, schedule: str) -> None:
    plan = ParallelPlan(pp=pp, schedule=schedule)
    peak = run_all(plan, lower(plan, m))
    expected = [min(pp - s, m) if schedule == "1f1b" else m for s in range(pp)]
    assert peak == expected


@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 4))
@settings(max_examples=100, deadline=None)
def test_interleaved_runs_and_keeps_its_memory_bound(pp: int, groups: int, vpp: int) -> None:
    plan = ParallelPlan(pp=pp, vpp=vpp, schedule="interleaved_1f1b")
    m = pp * groups
    peak = run_all(plan, lower(plan, m))
    bound = [2 * (pp - s - 1) + (vpp - 1) * pp + 1 for s in range(pp)]
    assert all(p <= min(b, m * vpp) for p, b in zip(peak, bound, strict=True))


@pytest.mark.parametrize(
    "plan", [ParallelPlan(pp=4), ParallelPlan(pp=2, vpp=2, schedule="interleaved_1f1b")]
)
def test_each_microbatch_passes_each_chunk_once(plan: ParallelPlan) -> None:
    actions = [a for rank in lower(plan, 4) for a in rank]
    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
        seen = sorted((a.chunk, a.microbatch) for a in actions if a.kind is kind)
        assert seen == [(c, m) for c in range(plan.num_chunks) for m in range(4)]


def test_a_data_parallel_step_ends_with_reduction_and_optimizer() -> None:
    (only,) = lower(ParallelPlan(dp_shard=2), 2)
    assert [a.kind for a in only[-2:]] == [ActionKind.REDUCE_GRADIENTS, ActionKind.OPTIMIZER_STEP]
    (alone,) = lower(ParallelPlan(), 2)
    assert ActionKind.REDUCE_GRADIENTS not in {a.kind for a in alone}
