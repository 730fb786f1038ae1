"""The loop of a phase: who comes next, and what happens then."""

from __future__ import annotations

import numpy as np

from flopwright.plan import rollout_choices as policy
from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.compiled import columns as c
from flopwright.simulator.rollouts.compiled.cache import (
    acquire,
    evict,
    note,
    release,
    rest,
)
from flopwright.simulator.rollouts.compiled.columns import Arrays
from flopwright.simulator.rollouts.compiled.handle import bind
from flopwright.simulator.rollouts.compiled.heaps import (
    append,
    pop,
    push,
)
from flopwright.simulator.rollouts.compiled.jit import compiled_once, native
from flopwright.simulator.rollouts.compiled.policies import limit_after_completion
from flopwright.simulator.rollouts.compiled.queues import (
    call,
    emptiest,
    enqueue,
    fill,
    finish,
    share_out,
    take,
)
from flopwright.simulator.rollouts.compiled.slots import (
    give_slot_back,
    make_room,
    read,
    settle,
    wait_own,
)
from flopwright.simulator.rollouts.compiled.stretch import (
    advance,
    nudge,
    plan,
    span_s,
    whole_until,
)
from flopwright.simulator.rollouts.compiled.verdicts import judge, last_verdicts


@native
def happens(s: Arrays, now_s: float) -> None:
    """A tool answers, a load ends, or a verdict is there."""
    rows = s.rows
    r = pop(rows, s.times, s.roots, 3 * s.rules[c.INSTANCES] + 1)
    s.sums[c.LAST_S] = now_s
    s.counts[c.EVENTS] += 1
    i = rows[r, st.HOME]
    if rows[r, st.STATUS] == st.LOADING:
        append(rows, s.ints[i], c.LOAD_HEAD, c.LOAD_TAIL, st.LANE_BEFORE, st.LANE_AFTER, r)
        note(s, now_s, st.LOADED, r, i)
        nudge(s, i, now_s)
        return
    if rows[r, st.STATUS] == st.JUDGED:
        note(s, now_s, st.VERDICT, r, -1)
        finish(s, r, now_s)
        return
    note(s, now_s, st.RETURN, r, i)
    if s.rules[c.BUDGET] > 0 and rows[r, st.SPENT] >= s.rules[c.BUDGET]:
        rows[r, st.STATUS] = st.SPENT_UP
        s.ints[i, c.BEGUN] -= 1
        return
    rows[r, st.STATUS] = st.PARKED
    wait_own(s, i, r, now_s)
    if s.ints[i, c.HOLDING] < s.rules[c.SLOTS]:
        nudge(s, i, now_s)


@native
def let_go(s: Arrays, i: int, now_s: float) -> None:
    """Takes what has run its tokens out of its slot: complete, to a tool, or back in line."""
    rows, rules = s.rows, s.rules
    done = -1  # completions of this step, oldest last, linked by SIBLING
    step = float(s.ints[i, c.STEP])
    while s.roots[i] >= 0 and s.times[s.roots[i], st.KEY] == step:
        r = pop(rows, s.times, s.roots, i)
        settle(s, i, r)
        give_slot_back(s, i, r)
        if rows[r, st.TOKENS] == rows[r, st.TOTAL]:
            rows[r, st.CHILD] = done
            done = r
            continue
        rest(s, i, r)
        if rows[r, st.TURN_DONE] == s.turns[rows[r, st.TURN], 0]:
            call(s, r, now_s)
            note(s, now_s, st.CALL, r, i)
            if rules[c.DROP_IDLE]:
                evict(s, i, r)
        elif rules[c.BUDGET] > 0 and rows[r, st.SPENT] >= rules[c.BUDGET]:
            rows[r, st.STATUS] = st.SPENT_UP
            s.ints[i, c.BEGUN] -= 1
            note(s, now_s, st.SPEND, r, i)
        else:
            rows[r, st.STATUS] = st.PARKED
            s.ints[i, c.BEGUN] -= 1
            enqueue(s, r)
            note(s, now_s, st.CHUNK, r, i)
    if done >= 0:
        complete(s, i, done, now_s)


@native
def complete(s: Arrays, i: int, done: int, now_s: float) -> None:
    """Frees and counts the completions of a step, oldest first."""
    rows, rules = s.rows, s.rules
    first = -1  # turned round: oldest first
    while done >= 0:
        after = rows[done, st.CHILD]
        rows[done, st.CHILD] = first
        first, done = done, after
    r = first
    while r >= 0:
        release(s, i, r, rows[r, st.CONTEXT])
        rows[r, st.PLACE], rows[r, st.CACHED] = policy.NOWHERE, 0
        s.ints[i, c.BEGUN] -= 1
        if rules[c.THROTTLED]:
            line = s.ints[i, c.DEALT_SIZE] if rules[c.DEALT] else s.counts[c.POOL_SIZE]
            s.floats[i, c.LIMIT] = limit_after_completion(
                s.floats[i, c.LIMIT], s.rates[c.INCREASE], s.ints[i, c.OWN_SIZE] + line,
                s.ints[i, c.USED], rules[c.LOW],
            )  # fmt: skip
        r = rows[r, st.CHILD]
    r = first
    while r >= 0 and rules[c.REWARDED] != policy.NOTHING:
        after = rows[r, st.CHILD]
        note(s, now_s, st.FINISH, r, i)
        judge(s, r, now_s)
        r = after
    if rules[c.REWARDED] != policy.NOTHING:
        return
    r = first
    while r >= 0:
        finish(s, r, now_s)
        r = rows[r, st.CHILD]
    r = first
    while r >= 0:
        note(s, now_s, st.FINISH, r, i)
        r = rows[r, st.CHILD]


@native
def boundary(s: Arrays, i: int, now_s: float) -> None:
    """What happens at the end of a step."""
    s.sums[c.LAST_S] = s.floats[i, c.NOTED_S] = now_s
    s.counts[c.EVENTS] += 1
    advance(s, i, s.ints[i, c.PLANNED], now_s)
    s.ints[i, c.BLOCKED] = 0
    let_go(s, i, now_s)
    if s.counts[c.OVER]:
        return
    r = s.ints[i, c.LOAD_HEAD]
    s.ints[i, c.LOAD_HEAD] = s.ints[i, c.LOAD_TAIL] = -1
    while r >= 0:
        after = s.rows[r, st.LANE_AFTER]
        read(s, i, r)
        r = after
    calm = make_room(s, i)
    s.ints[i, c.BLOCKED] = 0 if calm else 1
    if calm:
        fill(s, i, now_s)
        if s.roots[s.rules[c.INSTANCES] + i] < 0 and not s.rules[c.DEALT]:
            take(s, i, now_s)
    plan(s, i)
    if s.counts[c.POOL_SIZE] > 0 and s.rules[c.CHUNK_TOKENS] > 0:
        other = emptiest(s, i)
        if other >= 0:
            nudge(s, other, now_s)


@native
def close(s: Arrays, i: int, end_s: float) -> None:
    """Ends the phase here: whole steps until `end_s`, then everybody out of their slots."""
    rows = s.rows
    if s.ints[i, c.PLANNED] > 0:
        start_s = s.floats[i, c.START_S]
        steps = whole_until(s, i, end_s)
        cut_s = start_s + span_s(s, i, steps)
        s.floats[i, c.BUSY_S] += s.ints[i, c.DECODING] * max(0.0, end_s - max(start_s, cut_s))
        advance(s, i, steps, min(cut_s, end_s) if start_s <= end_s else start_s)
        s.floats[i, c.NOTED_S] = end_s
        let_go(s, i, end_s)
    r = s.ints[i, c.HEAD]
    while r >= 0:
        was = rows[r, st.STATUS]
        if was == st.RUNNING:
            settle(s, i, r)
        if was == st.PREFILL:
            rows[r, st.PLACE], rows[r, st.CACHED] = policy.NOWHERE, 0
        rows[r, st.STATUS] = st.PARKED if rows[r, st.TOKENS] > 0 else st.QUEUED
        r = rows[r, st.AFTER]


@native
def begin(s: Arrays) -> None:
    """Puts every attempt where it stands at the start, and fills the instances."""
    rows, instances = s.rows, s.rules[c.INSTANCES]
    for r in range(rows.shape[0]):
        place, tokens = rows[r, st.PLACE], rows[r, st.CACHED]
        if place == policy.ON_HOST:
            s.counts[c.HOST_USED] += tokens
        elif place == policy.ON_NVME:
            s.counts[c.NVME_USED] += tokens
        elif place == policy.ON_GPU:
            acquire(s, rows[r, st.HOME], r, tokens)
            rest(s, rows[r, st.HOME], r)
    s.counts[c.HOST_PEAK] = s.counts[c.HOST_USED]
    for r in range(rows.shape[0]):
        if rows[r, st.STATUS] == st.FINISHED:
            finish(s, r, 0.0)
            rows[r, st.CHILD] = -2  # to be noted
    for r in range(rows.shape[0]):
        if rows[r, st.CHILD] == -2:
            rows[r, st.CHILD] = -1
            note(s, 0.0, st.FINISH, r, -1)
    if s.counts[c.OVER]:
        return
    for r in range(rows.shape[0]):
        status = rows[r, st.STATUS]
        if status == st.JUDGED and s.times[r, st.READY_S] < np.inf:
            s.times[r, st.READY_S] = max(s.times[r, st.READY_S], 0.0)
            push(rows, s.times, s.roots, 3 * instances + 1, r, s.times[r, st.READY_S])
        elif status == st.TOOL:
            s.ints[rows[r, st.HOME], c.BEGUN] += 1
            s.times[r, st.READY_S] = max(s.times[r, st.READY_S], 0.0)
            push(rows, s.times, s.roots, 3 * instances + 1, r, s.times[r, st.READY_S])
        elif status in (st.QUEUED, st.PARKED):
            if rows[r, st.PLACE] == policy.ON_GPU:
                s.ints[rows[r, st.HOME], c.BEGUN] += 1
                wait_own(s, rows[r, st.HOME], r, -1.0)
            else:
                enqueue(s, r)
    for i in range(instances):
        fill(s, i, 0.0)
    share_out(s)
    for i in range(instances):
        plan(s, i)


@compiled_once
def run(at: int) -> None:
    """Runs one phase from its start to its end.

    Args:
        at: address of the table of its arrays (`handle.places`).
    """
    s = bind(at)
    begin(s)
    tools = 3 * s.rules[c.INSTANCES] + 1
    last_s, still, most = -1.0, 0, 1000 * (s.rules[c.INSTANCES] + s.rows.shape[0])
    while not s.counts[c.OVER]:
        r, i = s.roots[tools], s.tree[1]
        row_s = s.times[r, st.KEY] if r >= 0 else np.inf
        own_s = s.floats[i, c.NEXT_S]
        if min(row_s, own_s) > s.sums[c.DEADLINE_S]:
            s.sums[c.LAST_S] = s.sums[c.DEADLINE_S]
            break
        if row_s == np.inf and own_s == np.inf:
            break
        if min(row_s, own_s) > last_s:
            last_s, still = min(row_s, own_s), 0
        still += 1
        if still > most:  # time does not move on: better no result than no end
            s.counts[c.OVER] = 2
            break
        if row_s <= own_s:
            happens(s, row_s)
        else:
            boundary(s, i, own_s)
    end_s = s.sums[c.LAST_S]
    last_verdicts(s, end_s)
    for i in range(s.rules[c.INSTANCES]):
        close(s, i, end_s)
    note(s, end_s, st.END, -1, -1)
    for r in range(s.rows.shape[0]):
        if s.rows[r, st.STATUS] == st.SPENT_UP:
            s.rows[r, st.STATUS] = st.PARKED
