"""Verdicts without which a complete attempt does not count, as in rollouts/verdicts.py."""

from __future__ import annotations

import numpy as np

from flopwright.plan import rollout_choices as policy
from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.compiled import columns as c
from flopwright.simulator.rollouts.compiled.cache import note
from flopwright.simulator.rollouts.compiled.columns import Arrays
from flopwright.simulator.rollouts.compiled.heaps import push, take_server
from flopwright.simulator.rollouts.compiled.jit import native
from flopwright.simulator.rollouts.compiled.queues import finish


@native
def worked(s: Arrays, now_s: float, seconds: float) -> float:
    """Returns when the first free worker is done with a job that is there now."""
    end_s = max(now_s, s.judges[0]) + seconds
    take_server(s.judges, end_s)
    return end_s


@native
def expect(s: Arrays, r: int, time_s: float) -> None:
    """Makes the verdict on an attempt be there at a time."""
    s.times[r, st.READY_S] = time_s
    push(s.rows, s.times, s.roots, 3 * s.rules[c.INSTANCES] + 1, r, time_s)


@native
def judge(s: Arrays, r: int, now_s: float) -> None:
    """Puts an attempt that is complete in front of the workers."""
    rows = s.rows
    rows[r, st.STATUS] = st.JUDGED
    s.times[r, st.READY_S] = np.inf
    if s.rules[c.REWARDED] == policy.EACH:
        expect(s, r, worked(s, now_s, s.times[r, st.VERDICT_S]))
        return
    prompt, first, last = rows[r, st.PROMPT], r, r + 1
    while first > 0 and rows[first - 1, st.PROMPT] == prompt:
        first -= 1
    while last < rows.shape[0] and rows[last, st.PROMPT] == prompt:
        last += 1
    count, each_s = 0, 0.0
    for k in range(first, last):
        if rows[k, st.STATUS] == st.JUDGED:
            count += 1
            each_s += s.times[k, st.VERDICT_S]
    if count < s.prompts[prompt, 0]:
        return
    each_s = each_s / count
    end_s = now_s
    for _ in range(s.rules[c.PAIRS]):
        end_s = max(end_s, worked(s, now_s, each_s))
    for k in range(first, last):
        if rows[k, st.STATUS] == st.JUDGED:
            expect(s, k, end_s)


@native
def last_verdicts(s: Arrays, end_s: float) -> None:
    """Counts the verdicts that are there in the very moment in which the round is over."""
    if s.rules[c.STRICT] == 1 or s.counts[c.OVER] != 1:
        return
    for r in range(s.rows.shape[0]):
        if s.rows[r, st.STATUS] == st.JUDGED and s.times[r, st.READY_S] == end_s:
            note(s, end_s, st.VERDICT, r, -1)
            finish(s, r, end_s)
