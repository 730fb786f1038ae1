"""The decisions of a round, one small function each: numbers in, a number out.

A real engine, the event simulator and the compiled loop ask these same functions at decision
points (admission, completion, short cache, weight update), never per token. None calls
another function of this package or touches an object, so that a compiler of numeric Python
takes each as it stands. Nothing here knows how long an attempt will become, except through
an estimate that the caller hands in.
"""

from __future__ import annotations

from typing import Any, Final

# orders of the queue
FIFO: Final = 0
LONGEST_FIRST: Final = 1  # oracle: the same with the true length for an estimate
PROBE: Final = 2

# where the cache of an attempt is
NOWHERE: Final = 0
ON_GPU: Final = 1
ON_HOST: Final = 2
ON_NVME: Final = 3

# what has to be there for a complete attempt to count
NOTHING: Final = 0
EACH: Final = 1  # its own verdict
PAIRS: Final = 2  # comparisons of all samples of its prompt


def queue_key(
    order: int, parked: bool, tokens: float, estimate: float, probe: bool, seen: float
) -> float:
    """Returns where an attempt stands in the queue; lower goes first, ties by age.

    Args:
        parked: it has tokens of this or an earlier round: first in, first out resumes it first.
        tokens: generated so far.
        estimate: tokens it is thought to have in the end.
        probe: it is the one sample of its prompt that goes ahead.
        seen: tokens of the longest complete sample of its prompt; 0: none is complete.
    """
    if order == 0:
        return 0.0 if parked else 1.0
    if order == 1:
        return -max(estimate - tokens, 0.0)
    if seen <= 0.0:
        return -3e18 if probe else -2e18
    return -max(seen - tokens, 0.0)


def round_over(completed: int, needed: int, overdue: int) -> bool:
    """Returns whether the generation phase ends.

    Args:
        completed: attempts (or prompts) complete in this round; `needed` of them end it.
        overdue: attempts still running that must not become a version older.
    """
    return completed >= needed and overdue == 0


def counts_now(strict: bool, over: bool) -> bool:
    """Returns whether a completion counts in this round rather than in the next.

    Strict ties: what finishes in the same step, after the round is over, counts in the next.
    """
    return not (strict and over)


def least_loaded(running: Any, open_: Any) -> int:
    """Returns the open instance with the fewest attempts, the lowest index on a tie; -1: none."""
    best = -1
    for i in range(len(running)):
        if open_[i] and (best < 0 or running[i] < running[best]):
            best = i
    return best


def fits(
    running: int, slots: float, used: int, new: int, growth: int, idle: int, capacity: int
) -> bool:
    """Returns whether an instance has a slot and cache for one more attempt.

    An empty one has, once it evicts what waits: no context is larger than the capacity.

    Args:
        running: attempts that hold a slot; `slots`: the most that may.
        used: blocks of cache taken, `idle` of them by attempts that wait and can be evicted.
        new: blocks the newcomer takes; growth: blocks that the next step of all would add.
    """
    return running < slots and (running == 0 or used - idle + new + growth <= capacity)


def throttle_admits(running: int, limit: float, used: int, new: int, most: int) -> bool:
    """Returns whether the throttle lets one more attempt in; an empty instance always may.

    Args:
        running: attempts that run; for one that is not begun those in tool calls count too.
        limit: attempts that may be so at present.
        used: blocks of cache that it has to count. For an attempt that is begun those of waiting
            caches do not: it goes before them, or what waits for a tool would hold up all. For
            a new one they do: who waits comes back.
        most: blocks of cache up to which it admits.
    """
    return running == 0 or (running < limit and used + new <= most)


def limit_after_preemption(active: int, decrease: float) -> float:
    """Returns the throttle's limit when a cache was lost for want of room: fewer than are active.

    Args:
        active: attempts that run or are in a tool call.
    """
    return max(1.0, active * decrease)


def limit_after_completion(
    limit: float, increase: float, queued: int, used: int, low: int
) -> float:
    """Returns the throttle's limit after a completion: more, if others wait and cache is free."""
    return limit + increase if queued > 0 and used < low else limit


def pulls(running: int, least: int) -> bool:
    """Returns whether an instance takes from the shared queue, or leaves it to an emptier one."""
    return running <= least


def cache_goes(tokens: int, host_free: int, nvme_free: int) -> int:
    """Returns where a cache that leaves the GPU goes: the host, NVMe, or nowhere."""
    if tokens <= host_free:
        return 2
    if tokens <= nvme_free:
        return 3
    return 0
