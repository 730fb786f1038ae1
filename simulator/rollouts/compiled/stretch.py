"""How long a stretch of steps takes, how far an instance plans, and how it moves on."""

from __future__ import annotations

import numpy as np

from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.compiled import columns as c
from flopwright.simulator.rollouts.compiled.cache import growth, steps_that_fit
from flopwright.simulator.rollouts.compiled.columns import Arrays
from flopwright.simulator.rollouts.compiled.heaps import set_next, unlink
from flopwright.simulator.rollouts.compiled.jit import native
from flopwright.simulator.rollouts.compiled.policies import (
    prefill_s,
    steps_within,
    stretch_s,
)
from flopwright.simulator.rollouts.compiled.slots import join


@native
def ride_of(s: Arrays, i: int) -> int:
    """Returns the tokens of prefill that ride along with a step."""
    return max(1, s.rules[c.RIDE] - s.ints[i, c.DECODING])


@native
def span_s(s: Arrays, i: int, steps: int) -> float:
    """Returns the seconds of so many steps of the present stretch."""
    active = s.ints[i, c.DECODING]
    left, at = 0, 0
    if s.ints[i, c.BATCH] == 1:
        head = s.ints[i, c.LANE_HEAD]
        left, at = s.rows[head, st.PRE_LEFT], s.rows[head, st.PRE_AT]
    return stretch_s(
        s.tables[0, active], s.tables[1, active], active, s.ints[i, c.READING],
        s.rates[c.FIXED_S], s.rates[c.TOKEN_S], s.rates[c.PAIR_S],
        ride_of(s, i), left, at, s.floats[i, c.BATCH_S], steps,
    )  # fmt: skip


@native
def whole_until(s: Arrays, i: int, until_s: float) -> int:
    """Returns the whole steps of the present stretch that end by then."""
    active = s.ints[i, c.DECODING]
    left, at = 0, 0
    if s.ints[i, c.BATCH] == 1:
        head = s.ints[i, c.LANE_HEAD]
        left, at = s.rows[head, st.PRE_LEFT], s.rows[head, st.PRE_AT]
    return steps_within(
        s.tables[0, active], s.tables[1, active], active, s.ints[i, c.READING],
        s.rates[c.FIXED_S], s.rates[c.TOKEN_S], s.rates[c.PAIR_S],
        ride_of(s, i), left, at, s.floats[i, c.BATCH_S],
        s.floats[i, c.START_S], until_s, s.ints[i, c.PLANNED],
    )  # fmt: skip


@native
def plan_lane(s: Arrays, i: int) -> int:
    """Chooses which prefills the next steps carry; returns the steps they take."""
    rows, rates = s.rows, s.rates
    ride = ride_of(s, i)
    r = s.ints[i, c.LANE_HEAD]
    if rows[r, st.PRE_LEFT] >= ride:
        s.ints[i, c.BATCH] = 1
        return (rows[r, st.PRE_LEFT] + ride - 1) // ride
    left, batch, batch_s = ride, 0, rates[c.FIXED_S]
    while r >= 0 and rows[r, st.PRE_LEFT] <= left:
        left -= rows[r, st.PRE_LEFT]
        batch += 1
        batch_s += prefill_s(
            rates[c.TOKEN_S], rates[c.PAIR_S], rows[r, st.PRE_LEFT], rows[r, st.PRE_AT]
        )
        r = rows[r, st.LANE_AFTER]
    s.ints[i, c.BATCH] = batch
    s.floats[i, c.BATCH_S] = batch_s if batch > 1 else 0.0
    return 1


@native
def plan(s: Arrays, i: int) -> None:
    """Sets how many steps run until the next boundary, and when that is."""
    s.ints[i, c.BATCH], s.floats[i, c.BATCH_S], s.ints[i, c.FIXED_PAID] = 0, 0.0, 0
    first, lane = s.roots[i], s.ints[i, c.LANE_HEAD]
    if first < 0 and lane < 0:
        s.ints[i, c.PLANNED] = 0
        set_next(s, i, np.inf)
        return
    steps = st.NO_LIMIT
    if first >= 0:
        steps = int(s.times[first, st.KEY]) - s.ints[i, c.STEP]
    if lane >= 0:
        steps = min(steps, plan_lane(s, i))
    steps = steps_that_fit(s, i, steps)
    s.ints[i, c.PLANNED] = steps
    set_next(s, i, s.floats[i, c.START_S] + span_s(s, i, steps))


@native
def nudge(s: Arrays, i: int, now_s: float) -> None:
    """Brings the next boundary forward to the first step that ends at or after `now_s`."""
    if now_s >= s.floats[i, c.NEXT_S] or s.counts[c.OVER]:
        return
    start_s = s.floats[i, c.START_S]
    if s.floats[i, c.NEXT_S] == np.inf:
        s.ints[i, c.PLANNED] = 0
        set_next(s, i, max(now_s, start_s))
        return
    steps = whole_until(s, i, now_s)
    if start_s + span_s(s, i, steps) < now_s:
        steps += 1
    if steps < s.ints[i, c.PLANNED]:
        s.ints[i, c.PLANNED] = steps
        set_next(s, i, start_s + span_s(s, i, steps))


@native
def advance(s: Arrays, i: int, steps: int, now_s: float) -> None:
    """Moves the present stretch on by so many steps."""
    rows, active = s.rows, s.ints[i, c.DECODING]
    s.floats[i, c.BUSY_S] += active * (now_s - s.floats[i, c.START_S])
    s.ints[i, c.USED] += growth(s, i, steps)
    s.ints[i, c.PEAK] = max(s.ints[i, c.PEAK], s.ints[i, c.USED])
    s.ints[i, c.READING] += active * steps
    ride, batch = ride_of(s, i), s.ints[i, c.BATCH]
    s.ints[i, c.STEP] += steps
    joins = 0
    if batch == 1:
        r = s.ints[i, c.LANE_HEAD]
        done = min(rows[r, st.PRE_LEFT], steps * ride)
        s.sums[c.PREFILL_SECONDS] += steps * s.rates[c.FIXED_S] + prefill_s(
            s.rates[c.TOKEN_S], s.rates[c.PAIR_S], done, rows[r, st.PRE_AT]
        )
        rows[r, st.PRE_LEFT] -= done
        rows[r, st.PRE_AT] += done
        joins = 1 if rows[r, st.PRE_LEFT] == 0 else 0
    elif batch > 1 and steps > 0:
        joins = batch
        s.sums[c.PREFILL_SECONDS] += s.floats[i, c.BATCH_S]
    for _ in range(joins):
        r = s.ints[i, c.LANE_HEAD]
        unlink(rows, s.ints[i], c.LANE_HEAD, c.LANE_TAIL, st.LANE_BEFORE, st.LANE_AFTER, r)
        join(s, i, r)
    s.ints[i, c.BATCH], s.floats[i, c.BATCH_S] = 0, 0.0
    s.floats[i, c.START_S], s.ints[i, c.PLANNED] = now_s, 0
