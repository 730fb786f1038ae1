"""Queues, completions and tools of a phase, as in generation.py."""

from __future__ import annotations

from flopwright.plan import rollout_choices as policy
from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.compiled import columns as c
from flopwright.simulator.rollouts.compiled.columns import Arrays
from flopwright.simulator.rollouts.compiled.heaps import (
    pop,
    push,
    take_out,
    take_server,
)
from flopwright.simulator.rollouts.compiled.jit import native
from flopwright.simulator.rollouts.compiled.policies import (
    counts_now,
    pulls,
    queue_key,
    round_over,
)
from flopwright.simulator.rollouts.compiled.slots import admit, admits


@native
def key_of(s: Arrays, r: int) -> float:
    """Returns where an attempt stands in the queue."""
    rows = s.rows
    prompt = rows[r, st.PROMPT]
    probe = r == 0 or rows[r - 1, st.PROMPT] != prompt
    tokens = rows[r, st.TOKENS]
    return queue_key(
        s.rules[c.ORDER], tokens > 0, float(tokens), s.times[r, st.ESTIMATE], probe,
        float(s.prompts[prompt, 1]),
    )  # fmt: skip


@native
def enqueue(s: Arrays, r: int) -> None:
    """Puts an attempt into the queue that it is taken from."""
    instances = s.rules[c.INSTANCES]
    if s.rules[c.DEALT]:
        i = s.dealt[r]
        push(s.rows, s.times, s.roots, 2 * instances + i, r, key_of(s, r))
        s.ints[i, c.DEALT_SIZE] += 1
    else:
        push(s.rows, s.times, s.roots, 3 * instances, r, key_of(s, r))
        s.counts[c.POOL_SIZE] += 1


@native
def rekey_siblings(s: Arrays, r: int) -> None:
    """Orders the waiting samples of a prompt anew: one more of it is complete."""
    rows, first = s.rows, 2 * s.rules[c.INSTANCES]
    prompt = rows[r, st.PROMPT]
    at = r
    while at > 0 and rows[at - 1, st.PROMPT] == prompt:
        at -= 1
    while at < rows.shape[0] and rows[at, st.PROMPT] == prompt:
        heap = rows[at, st.IN]
        if first <= heap <= 3 * s.rules[c.INSTANCES]:
            take_out(rows, s.times, s.roots, at)
            push(rows, s.times, s.roots, heap, at, key_of(s, at))
        at += 1


@native
def finish(s: Arrays, r: int, now_s: float) -> None:
    """Counts an attempt that finished; ends the phase if that was it."""
    rows = s.rows
    counted = counts_now(s.rules[c.STRICT] == 1, s.counts[c.OVER] == 1)
    rows[r, st.STATUS] = st.DONE if counted else st.FINISHED
    prompt = rows[r, st.PROMPT]
    if rows[r, st.TOTAL] > s.prompts[prompt, 1]:
        s.prompts[prompt, 1] = rows[r, st.TOTAL]
        if s.rules[c.ORDER] == policy.PROBE:
            rekey_siblings(s, r)
    if not counted:
        return
    n = s.counts[c.FINISHES]
    s.finish_s[n], s.finish_row[n] = now_s, r
    s.counts[c.FINISHES] = n + 1
    s.counts[c.OVERDUE] -= rows[r, st.MUST]
    rows[r, st.MUST] = 0
    s.prompts[prompt, 0] -= 1
    if s.rules[c.GROUPS]:
        s.counts[c.COMPLETED] += 1 if s.prompts[prompt, 0] == 0 else 0
    else:
        s.counts[c.COMPLETED] += 1
    if round_over(s.counts[c.COMPLETED], s.rules[c.NEEDED], s.counts[c.OVERDUE]):
        s.counts[c.OVER] = 1


@native
def call(s: Arrays, r: int, now_s: float) -> None:
    """Starts the tool call after the turn that just ended."""
    rows = s.rows
    turn = rows[r, st.TURN]
    seconds, begin_s = s.turn_s[turn], now_s
    if s.servers.shape[0] > 0:
        begin_s = max(now_s, s.servers[0])
        take_server(s.servers, begin_s + seconds)
    s.times[r, st.READY_S] = begin_s + seconds
    rows[r, st.CONTEXT] += s.turns[turn, 1]
    rows[r, st.TURN] = turn + 1
    rows[r, st.TURN_DONE] = 0
    rows[r, st.STATUS] = st.TOOL
    s.counts[c.TOOL_CALLS] += 1
    s.sums[c.TOOL_WAIT_S] += begin_s - now_s
    push(rows, s.times, s.roots, 3 * s.rules[c.INSTANCES] + 1, r, s.times[r, st.READY_S])


@native
def fill(s: Arrays, i: int, now_s: float) -> None:
    """Admits from the own queue, then from the one that attempts were dealt to."""
    instances = s.rules[c.INSTANCES]
    heap = instances + i
    while s.roots[heap] >= 0:
        r = s.roots[heap]
        if not admits(s, i, r, True):
            s.ints[i, c.BLOCKED] = 1  # who waits here goes before the shared queue
            return
        pop(s.rows, s.times, s.roots, heap)
        s.ints[i, c.OWN_SIZE] -= 1
        admit(s, i, r, now_s)
    heap = 2 * instances + i
    while s.roots[heap] >= 0:
        r = s.roots[heap]
        if not admits(s, i, r, False):
            s.ints[i, c.BLOCKED] = 1
            return
        pop(s.rows, s.times, s.roots, heap)
        s.ints[i, c.DEALT_SIZE] -= 1
        s.ints[i, c.BEGUN] += 1
        admit(s, i, r, now_s)


@native
def emptiest(s: Arrays, but: int) -> int:
    """Returns the instance with the fewest attempts among those not blocked, `but` one; or -1."""
    best = -1
    for i in range(s.rules[c.INSTANCES]):
        if i == but or s.ints[i, c.BLOCKED] == 1:
            continue
        if best < 0 or s.ints[i, c.HOLDING] < s.ints[best, c.HOLDING]:
            best = i
    return best


@native
def take(s: Arrays, i: int, now_s: float) -> None:
    """Admits from the shared queue while its head may have a slot."""
    heap = 3 * s.rules[c.INSTANCES]
    while s.roots[heap] >= 0:
        r = s.roots[heap]
        if s.rules[c.CHUNK_TOKENS] > 0:
            other = emptiest(s, i)
            least = s.ints[other, c.HOLDING] if other >= 0 else s.ints[i, c.HOLDING]
            if not pulls(s.ints[i, c.HOLDING], least):
                return
        if not admits(s, i, r, False):
            s.ints[i, c.BLOCKED] = 1
            return
        pop(s.rows, s.times, s.roots, heap)
        s.counts[c.POOL_SIZE] -= 1
        s.ints[i, c.BEGUN] += 1
        admit(s, i, r, now_s)


@native
def share_out(s: Arrays) -> None:
    """Gives the shared queue, from its head, to the emptiest instances that admit it."""
    instances = s.rules[c.INSTANCES]
    heap = 3 * instances
    while s.roots[heap] >= 0:
        r, best = s.roots[heap], -1
        for i in range(instances):
            if best >= 0 and s.ints[i, c.HOLDING] >= s.ints[best, c.HOLDING]:
                continue
            if s.roots[instances + i] < 0 and admits(s, i, r, False):
                best = i
        if best < 0:
            return
        pop(s.rows, s.times, s.roots, heap)
        s.counts[c.POOL_SIZE] -= 1
        s.ints[best, c.BEGUN] += 1
        admit(s, best, r, 0.0)
