"""Who gets a slot and who loses it; the words are those of instance.py and instance_cache.py."""

from __future__ import annotations

from flopwright.plan import rollout_choices as policy
from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.compiled import columns as c
from flopwright.simulator.rollouts.compiled.cache import (
    acquire,
    blocks,
    count_residue,
    evict,
    growth,
    note,
    release,
    samples_here,
    stow,
    unrest,
    unstow,
)
from flopwright.simulator.rollouts.compiled.columns import Arrays
from flopwright.simulator.rollouts.compiled.heaps import (
    append,
    push,
    take_out,
    unlink,
)
from flopwright.simulator.rollouts.compiled.jit import native
from flopwright.simulator.rollouts.compiled.policies import (
    fits,
    limit_after_preemption,
    prefill_s,
    throttle_admits,
)


@native
def settle(s: Arrays, i: int, r: int) -> None:
    """Writes down the tokens that a decoding attempt generated; it is in no heap any more."""
    rows = s.rows
    finish = int(s.times[r, st.KEY])
    done = rows[r, st.RUN] - (finish - s.ints[i, c.STEP])
    rows[r, st.TOKENS] += done
    rows[r, st.TURN_DONE] += done
    rows[r, st.SPENT] += done
    rows[r, st.CONTEXT] += done
    context = rows[r, st.CONTEXT]
    rows[r, st.CACHED] = rows[r, st.SEEN] = context
    count_residue(s, i, r, -1)
    s.ints[i, c.DECODING] -= 1
    s.ints[i, c.READING] -= context
    if rows[r, st.FIRST] < 0 and rows[r, st.TOKENS] > 0:
        rows[r, st.FIRST] = s.rules[c.VERSION]
    s.counts[c.DECODED] += done


@native
def join(s: Arrays, i: int, r: int) -> None:
    """Lets an attempt decode from the next step on."""
    rows = s.rows
    context, cached = rows[r, st.CONTEXT], rows[r, st.CACHED]
    s.counts[c.PREFILL_TOKENS] += context - cached
    s.counts[c.RECOMPUTED] += max(0, rows[r, st.SEEN] - cached)
    rows[r, st.SEEN] = rows[r, st.CACHED] = context
    rows[r, st.STATUS] = st.RUNNING
    push(rows, s.times, s.roots, i, r, float(s.ints[i, c.STEP] + rows[r, st.RUN]))
    s.ints[i, c.DECODING] += 1
    s.ints[i, c.READING] += context
    count_residue(s, i, r, 1)


@native
def give_slot_back(s: Arrays, i: int, r: int) -> None:
    """Takes an attempt out of those with a slot."""
    unlink(s.rows, s.ints[i], c.HEAD, c.TAIL, st.BEFORE, st.AFTER, r)
    s.ints[i, c.HOLDING] -= 1


@native
def wait_own(s: Arrays, i: int, r: int, key: float) -> None:
    """Puts an attempt into the instance's own queue."""
    push(s.rows, s.times, s.roots, s.rules[c.INSTANCES] + i, r, key)
    s.ints[i, c.OWN_SIZE] += 1


@native
def active(s: Arrays, i: int) -> int:
    """Returns the attempts that run or are in a tool call."""
    return s.ints[i, c.BEGUN] - s.ints[i, c.OWN_SIZE]


@native
def press_out(s: Arrays, i: int) -> None:
    """Evicts the oldest waiting cache; the throttle takes one that is lost for a preemption."""
    r = s.ints[i, c.IDLE_HEAD]
    evict(s, i, r)
    if s.rules[c.THROTTLED] == 1 and s.rows[r, st.PLACE] == policy.NOWHERE:
        s.floats[i, c.LIMIT] = limit_after_preemption(active(s, i), s.rates[c.DECREASE])


@native
def preempt(s: Arrays, i: int, r: int) -> None:
    """Takes slot and cache from an attempt; it goes to the front of the instance's queue."""
    rows = s.rows
    if s.rules[c.THROTTLED]:
        s.floats[i, c.LIMIT] = limit_after_preemption(active(s, i), s.rates[c.DECREASE])
    was = rows[r, st.STATUS]
    give_slot_back(s, i, r)
    if was == st.RUNNING:
        take_out(rows, s.times, s.roots, r)
        settle(s, i, r)
    elif was == st.PREFILL:
        unlink(rows, s.ints[i], c.LANE_HEAD, c.LANE_TAIL, st.LANE_BEFORE, st.LANE_AFTER, r)
    elif rows[r, st.IN] >= 0:  # its load is under way
        take_out(rows, s.times, s.roots, r)
    release(s, i, r, rows[r, st.CONTEXT])
    rows[r, st.STATUS] = st.PARKED if rows[r, st.TOKENS] > 0 else st.QUEUED
    if was == st.RUNNING and s.rules[c.SWAP]:
        stow(s, r)
    elif was != st.LOADING:
        rows[r, st.PLACE], rows[r, st.CACHED] = policy.NOWHERE, 0
    wait_own(s, i, r, -1.0)
    s.counts[c.PREEMPTIONS] += 1
    note(s, s.floats[i, c.NOTED_S], st.PREEMPT, r, i)


@native
def make_room(s: Arrays, i: int) -> bool:
    """Frees cache for the next step; returns whether nobody had to be preempted."""
    calm = True
    while s.ints[i, c.USED] + growth(s, i, 1) > s.rules[c.CAPACITY]:
        if s.ints[i, c.IDLE_HEAD] >= 0:
            press_out(s, i)
        else:
            calm = False
            preempt(s, i, s.ints[i, c.TAIL])
    return calm


@native
def admits(s: Arrays, i: int, r: int, own: bool) -> bool:
    """Whether an attempt may have a slot now."""
    rows, rules = s.rows, s.rules
    if not own and s.ints[i, c.BEGUN] >= rules[c.CONCURRENCY]:
        return False
    context, cached = rows[r, st.CONTEXT], rows[r, st.CACHED]
    here = rows[r, st.PLACE] == policy.ON_GPU and rows[r, st.HOME] == i
    new, idle = blocks(s, context), s.ints[i, c.IDLE_BLOCKS]
    grow = growth(s, i, 1) + blocks(s, context + 1) - new
    if here:
        new -= blocks(s, cached)
        idle -= blocks(s, cached)
    elif rules[c.SHARED] > 0 and samples_here(s, i, r) == 0:
        new += rules[c.SHARED]
    holding, used = s.ints[i, c.HOLDING], s.ints[i, c.USED]
    if not fits(holding, rules[c.SLOTS], used, new, grow, idle, rules[c.CAPACITY]):
        return False
    if rules[c.THROTTLED] and not here:
        limit, most = s.floats[i, c.LIMIT], rules[c.HIGH]
        if own:
            return throttle_admits(holding, limit, used - idle, new, most)
        return throttle_admits(active(s, i), limit, used, new, most)
    return True


@native
def evict_for(s: Arrays, i: int, r: int) -> None:
    """Evicts waiting caches until a newcomer fits, with the next step of all."""
    context = s.rows[r, st.CONTEXT]
    own = blocks(s, context)
    grow = growth(s, i, 1) + blocks(s, context + 1) - own
    while True:
        need = own
        if s.rules[c.SHARED] > 0 and samples_here(s, i, r) == 0:
            need += s.rules[c.SHARED]
        if s.ints[i, c.USED] + need + grow <= s.rules[c.CAPACITY]:
            return
        press_out(s, i)


@native
def admit(s: Arrays, i: int, r: int, now_s: float) -> None:
    """Gives an attempt a slot: its cache is loaded, what is missing is read."""
    rows, rules = s.rows, s.rules
    s.floats[i, c.NOTED_S] = now_s
    if rows[r, st.PLACE] == policy.ON_GPU:
        home = rows[r, st.HOME]
        unrest(s, home, r)
        if home != i:
            stow(s, r)
    if rules[c.CAPACITY] < st.NO_LIMIT:
        evict_for(s, i, r)
    shared = rules[c.SHARED] > 0 and samples_here(s, i, r) > 0
    acquire(s, i, r, rows[r, st.CONTEXT])
    append(rows, s.ints[i], c.HEAD, c.TAIL, st.BEFORE, st.AFTER, r)
    s.ints[i, c.HOLDING] += 1
    place = rows[r, st.PLACE]
    if place == policy.NOWHERE:
        rows[r, st.CACHED] = rules[c.SHARED] * rules[c.BLOCK] if shared else 0
    run = s.turns[rows[r, st.TURN], 0] - rows[r, st.TURN_DONE]
    if rules[c.CHUNK_TOKENS] > 0:
        run = min(run, rules[c.CHUNK_TOKENS])
    if rules[c.BUDGET] > 0:
        run = min(run, rules[c.BUDGET] - rows[r, st.SPENT])
    rows[r, st.RUN] = run
    rows[r, st.HOME] = i
    note(s, now_s, st.ADMIT, r, i)
    away = place in (policy.ON_HOST, policy.ON_NVME)
    load_s = s.load_s[place] * rows[r, st.CACHED]
    if away and load_s > 0.0 and rules[c.PREFETCH]:
        rows[r, st.STATUS] = st.LOADING
        s.floats[i, c.COPY_FREE_S] = max(s.floats[i, c.COPY_FREE_S], now_s) + load_s
        s.times[r, st.READY_S] = s.floats[i, c.COPY_FREE_S]
        push(rows, s.times, s.roots, 3 * rules[c.INSTANCES] + 1, r, s.times[r, st.READY_S])
        return
    if away:
        s.floats[i, c.START_S] += load_s
    read(s, i, r)


@native
def read(s: Arrays, i: int, r: int) -> None:
    """Starts the prefill of what the cache of an admitted attempt lacks."""
    rows, rates = s.rows, s.rates
    if rows[r, st.PLACE] in (policy.ON_HOST, policy.ON_NVME):
        unstow(s, r)
        s.counts[c.LOADED_TOKENS] += rows[r, st.CACHED]
    rows[r, st.PLACE] = policy.ON_GPU
    left, at = rows[r, st.CONTEXT] - rows[r, st.CACHED], rows[r, st.CACHED]
    rows[r, st.PRE_LEFT], rows[r, st.PRE_AT] = left, at
    free = rates[c.FIXED_S] + rates[c.TOKEN_S] + rates[c.PAIR_S] <= 0.0
    if left > 0 and not free:
        if s.rules[c.RIDE] > 0:
            rows[r, st.STATUS] = st.PREFILL
            append(rows, s.ints[i], c.LANE_HEAD, c.LANE_TAIL, st.LANE_BEFORE, st.LANE_AFTER, r)
            return
        seconds = prefill_s(rates[c.TOKEN_S], rates[c.PAIR_S], left, at)
        if s.ints[i, c.FIXED_PAID] == 0:
            seconds += rates[c.FIXED_S]
            s.ints[i, c.FIXED_PAID] = 1
        s.floats[i, c.START_S] += seconds
        s.sums[c.PREFILL_SECONDS] += seconds
    join(s, i, r)
