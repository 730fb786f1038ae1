"""Verdicts without which a complete attempt does not count, on the event engine.

Workers take jobs first come, first served. Where whole prompts are compared in pairs, the
comparisons begin when every sample in flight of the prompt is complete.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from flopwright.plan import rollout_choices as policy
from flopwright.simulator.rollouts import state as st

if TYPE_CHECKING:
    from flopwright.simulator.rollouts.attempt import Attempt
    from flopwright.simulator.rollouts.generation import Phase


def judge(phase: Phase, a: Attempt, now_s: float) -> None:
    """Puts an attempt that is complete in front of the workers."""
    rules = phase.state.rules
    a.status, a.ready_s = st.JUDGED, math.inf
    if rules.rewarded == policy.EACH:
        phase.expect(a, _worked(phase, now_s, a.verdict_s))
        return
    mine = [b for b in _samples(phase, a) if b.status == st.JUDGED]
    if len(mine) < phase.state.left[a.prompt]:
        return
    each_s = sum(b.verdict_s for b in mine) / len(mine)
    end_s = max(_worked(phase, now_s, each_s) for _ in range(rules.pairs))
    for b in mine:
        phase.expect(b, end_s)


def _worked(phase: Phase, now_s: float, seconds: float) -> float:
    """Returns when the first free worker is done with a job that is there now."""
    end_s = max(now_s, phase.judges[0]) + seconds
    heapq.heapreplace(phase.judges, end_s)
    return end_s


def _samples(phase: Phase, a: Attempt) -> list[Attempt]:
    """Returns the attempts in flight of an attempt's prompt, by age."""
    rows, first, last = phase.attempts, a.row, a.row + 1
    while first > 0 and rows[first - 1].prompt == a.prompt:
        first -= 1
    while last < len(rows) and rows[last].prompt == a.prompt:
        last += 1
    return rows[first:last]


def last_verdicts(phase: Phase, end_s: float) -> None:
    """Counts the verdicts that are there in the very moment in which the round is over."""
    if phase.state.rules.strict or not phase.over:
        return
    for a in phase.attempts:
        if a.status == st.JUDGED and a.ready_s == end_s:
            phase.note(end_s, st.VERDICT, a, None)
            phase.finish([a], end_s)
