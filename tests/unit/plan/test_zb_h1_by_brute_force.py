"""ZB-H1 against all orders there are: with 1F1B's memory and equal times none is faster.

Every state of a small pipeline is reached breadth first: each stage does a forward, an input
gradient, a weight gradient or nothing for one unit of time (arXiv 2401.10241, 2.1).
"""

from __future__ import annotations

from itertools import product

import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import ActionKind
from flopwright.plan.schedules.registry import compute_actions

Done = tuple[int, int, int]  # forwards, input gradients, weight gradients of a stage
State = tuple[Done, ...]


def _moves(state: State, stage: int, m: int, memory: int) -> list[Done]:
    """Returns what the stage's counts may be one unit later."""
    f, i, w = state[stage]
    above_f = m if stage == 0 else state[stage - 1][0]
    below_i = f if stage == len(state) - 1 else state[stage + 1][1]
    out = []
    if f < above_f and f - w < memory:
        out.append((f + 1, i, w))
    if i < min(f, below_i):
        out.append((f, i + 1, w))
    if w < i:
        out.append((f, i, w + 1))
    return out or [(f, i, w)]


def _fastest(pp: int, m: int, memory: int) -> int:
    """Returns the least units of time in which the pipeline is done."""
    reached: set[State] = {((0, 0, 0),) * pp}
    seen = set(reached)
    goal, time = ((m, m, m),) * pp, 0
    while goal not in reached:
        time += 1
        # Idling on purpose may help: a stage may also do nothing.
        following = {
            new
            for state in reached
            for new in product(*({*_moves(state, s, m, memory), state[s]} for s in range(pp)))
        }
        reached = following - seen
        seen |= reached
    return time


def _units_of(pp: int, m: int) -> int:
    """Returns the units of time that our list takes, each action as soon as it can run."""
    lists = compute_actions(ParallelPlan(pp=pp, schedule="zb_h1"), m)
    ready: dict[tuple[ActionKind, int, int], int] = {}
    clock, position = [0] * pp, [0] * pp
    while any(position[s] < len(lists[s]) for s in range(pp)):
        for s in range(pp):
            while position[s] < len(lists[s]):
                a = lists[s][position[s]]
                step = {ActionKind.FORWARD: -1, ActionKind.BACKWARD_INPUT: 1}.get(a.kind, 0)
                source = (a.kind, a.chunk + step, a.microbatch)
                if step and 0 <= a.chunk + step < pp and source not in ready:
                    break
                clock[s] = max(clock[s], ready.get(source, 0) if step else 0) + 1
                ready[a.kind, a.chunk, a.microbatch] = clock[s]
                position[s] += 1
    return max(clock)


@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 2), (2, 5), (3, 3), (3, 5), (4, 4)])
def test_no_order_with_1f1bs_memory_is_faster(pp: int, m: int) -> None:
    assert _units_of(pp, m) == _fastest(pp, m, memory=pp) == 3 * m + pp - 1


@pytest.mark.parametrize(("pp", "m"), [(2, 3), (3, 3)])
def test_less_memory_is_slower(pp: int, m: int) -> None:
    assert _fastest(pp, m, memory=pp - 1) > _units_of(pp, m)
