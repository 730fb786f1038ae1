"""The round policy: who runs, when a round ends, which prompts are ready to train on.

Pure functions over flat arrays, asked at decision points only (start of a round, a
completion, end of a round), never per token. The simulator and a real engine call the same
functions, so that a real round's decisions can be replayed. Nothing here knows how long an
attempt will become.

The policy: attempts that were parked resume first, oldest first; then new attempts start
in prompt order. A round ends when ceil(lambda * attempts in flight) have completed. Whether
attempts that finish in that very step count too is the tie policy. A prompt is dispatched
to training when all its samples are complete.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

QUEUED: Final = 0  # no token yet
RUNNING: Final = 1  # holds a slot
PARKED: Final = 2  # has tokens, was cut off by the end of a round
FINISHED: Final = 3  # complete, to be counted in the next round (strict ties)
DONE: Final = 4  # complete and counted

# One row an attempt. `submitted` is the policy version at which it came into flight,
# `first` the version of its first token (-1 before), `tokens` those generated so far.
ATTEMPT: Final = np.dtype(
    [
        ("id", np.int64),
        ("prompt", np.int64),
        ("status", np.int8),
        ("tokens", np.int64),
        ("submitted", np.int64),
        ("first", np.int64),
    ]
)
Attempts = npt.NDArray[np.void]
Rows = npt.NDArray[np.int64]


def stop_count(num_attempts: int, stop_fraction: float) -> int:
    """Returns how many completions end a round: ceil(lambda * M), at least one.

    A product that is whole up to rounding counts as whole: 0.7 * 10 is 7, not 8.
    """
    return min(num_attempts, max(1, math.ceil(stop_fraction * num_attempts - 1e-9)))


def new_attempts(
    first_id: int, count: int, samples_per_prompt: int, version: int
) -> npt.NDArray[Any]:
    """Returns `count` fresh rows, in prompt order; a prompt may be split between rounds."""
    rows = np.zeros(count, dtype=ATTEMPT)
    rows["id"] = np.arange(first_id, first_id + count)
    rows["prompt"] = rows["id"] // samples_per_prompt
    rows["submitted"] = version
    rows["first"] = -1
    return rows


def admission_order(attempts: Attempts) -> Rows:
    """Returns the rows that want a slot, in the order in which they get one.

    Resume-first: parked attempts by age, then queued ones by age (prompt order).
    """
    status = attempts["status"]
    waiting = np.flatnonzero((status == PARKED) | (status == QUEUED))
    fresh = status[waiting] == QUEUED
    return waiting[np.lexsort((attempts["id"][waiting], fresh))].astype(np.int64)


def place(num_waiting: int, free_slots: npt.NDArray[np.int64]) -> Rows:
    """Returns the instance of each of the first waiting attempts at the start of a round.

    In admission order each goes to the instance with the fewest attempts, the lowest index
    on a tie, while that has a free slot. The result is shorter than `num_waiting` where the
    slots do not suffice: the rest waits for a completion.
    """
    count = min(num_waiting, int(free_slots.sum()))
    depth = 0  # the smallest number of slots an instance at which all of `count` find room
    while int(np.minimum(free_slots, depth).sum()) < count:
        short = count - int(np.minimum(free_slots, depth).sum())
        depth += max(1, short // len(free_slots))
    room = np.minimum(free_slots, depth)
    instance = np.repeat(np.arange(len(free_slots), dtype=np.int64), room)
    level = np.concatenate([np.arange(r, dtype=np.int64) for r in room])
    order = np.lexsort((instance, level))[:count]
    return instance[order].astype(np.int64)


def admit_count(num_waiting: int, num_free: int) -> int:
    """Returns how many waiting attempts an instance takes after a completion."""
    return min(num_waiting, num_free)


def count_completions(num_finished: int, completed: int, needed: int, strict: bool) -> int:
    """Returns how many of the attempts that finish in one step count in this round.

    Strict ties count no more than the round still needs, oldest first; otherwise all.
    """
    return min(num_finished, needed - completed) if strict else num_finished


def round_over(completed: int, needed: int) -> bool:
    """Returns whether the generation phase ends."""
    return completed >= needed


def park(attempts: Attempts) -> None:
    """Turns attempts cut off by the end of a round into parked ones, in place.

    They keep their tokens. One that got a slot but no token yet is queued again.
    """
    running = attempts["status"] == RUNNING
    started = attempts["tokens"] > 0
    attempts["status"][running & started] = PARKED
    attempts["status"][running & ~started] = QUEUED
    attempts["first"][running & ~started] = -1


def dispatch(prompts: Rows, samples_per_prompt: int) -> Rows:
    """Returns the prompts all of whose samples are among the complete, undispatched ones.

    Args:
        prompts: the prompt of every complete attempt that has not been trained on.
        samples_per_prompt: K; the prompt goes to training with all K or waits.
    """
    unique, counts = np.unique(prompts, return_counts=True)
    complete: Rows = unique[counts == samples_per_prompt]
    return complete
