"""Cache blocks of an instance, and what leaves its GPUs."""

from __future__ import annotations

from flopwright.plan import rollout_choices as policy
from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.compiled import columns as c
from flopwright.simulator.rollouts.compiled.columns import Arrays
from flopwright.simulator.rollouts.compiled.heaps import append, unlink
from flopwright.simulator.rollouts.compiled.jit import native
from flopwright.simulator.rollouts.compiled.policies import cache_goes


@native
def blocks(s: Arrays, context: int) -> int:
    """Returns the blocks of a context that are its own."""
    size = s.rules[c.BLOCK]
    return (context + size - 1) // size + s.rules[c.STATE_BLOCKS] - s.rules[c.SHARED]


@native
def samples_here(s: Arrays, i: int, r: int) -> int:
    """Returns how many caches on an instance share the prompt of a row."""
    if s.rules[c.SHARED] == 0:
        return 0
    return s.samples[i, s.rows[r, st.PROMPT]]


@native
def acquire(s: Arrays, i: int, r: int, context: int) -> None:
    """Takes the blocks of a context."""
    used = s.ints[i, c.USED] + blocks(s, context)
    if s.rules[c.SHARED] > 0:
        prompt = s.rows[r, st.PROMPT]
        if s.samples[i, prompt] == 0:
            used += s.rules[c.SHARED]
        s.samples[i, prompt] += 1
    s.ints[i, c.USED] = used
    s.ints[i, c.PEAK] = max(s.ints[i, c.PEAK], used)


@native
def release(s: Arrays, i: int, r: int, context: int) -> None:
    """Gives the blocks of a context back."""
    used = s.ints[i, c.USED] - blocks(s, context)
    if s.rules[c.SHARED] > 0:
        prompt = s.rows[r, st.PROMPT]
        s.samples[i, prompt] -= 1
        if s.samples[i, prompt] == 0:
            used -= s.rules[c.SHARED]
    s.ints[i, c.USED] = used


@native
def count_residue(s: Arrays, i: int, r: int, by: int) -> None:
    """Adds a decoding attempt to the count of those whose context ends where its does."""
    size = s.rules[c.BLOCK]
    if size > 1:
        s.residues[i, (s.rows[r, st.CONTEXT] - s.ints[i, c.STEP]) % size] += by


@native
def growth(s: Arrays, i: int, steps: int) -> int:
    """Returns the blocks that the decoding attempts take on in so many steps.

    Over a whole block of steps each takes on one; what is left over is looked up by residue.
    """
    size, active = s.rules[c.BLOCK], s.ints[i, c.DECODING]
    if size == 1:
        return active * steps
    total = steps // size * active
    at = (-s.ints[i, c.STEP]) % size
    for _ in range(steps % size):
        total += s.residues[i, at]
        at = at - 1 if at > 0 else size - 1
    return total


@native
def steps_that_fit(s: Arrays, i: int, steps: int) -> int:
    """Returns how many of `steps` steps the free cache of an instance carries."""
    size, active = s.rules[c.BLOCK], s.ints[i, c.DECODING]
    free = s.rules[c.CAPACITY] - s.ints[i, c.USED]
    if active == 0 or free // active > steps // size:  # (a product could overflow)
        return steps
    fit = free // active * size
    left = free - free // active * active
    at = (-(s.ints[i, c.STEP] + fit)) % size
    for j in range(size):
        left -= s.residues[i, at] if size > 1 else active
        if left < 0 or fit + j >= steps:
            return min(fit + j, steps)
        at = at - 1 if at > 0 else size - 1
    return min(fit + size, steps)


@native
def note(s: Arrays, time_s: float, kind: int, r: int, i: int) -> None:
    """Writes an entry of the log, while that has room."""
    n = s.counts[c.LOGGED]
    s.counts[c.LOGGED] = n + 1
    if n < s.log_s.shape[0]:
        s.log_s[n] = time_s
        s.log[n, 0] = kind
        s.log[n, 1] = s.rows[r, st.ID] if r >= 0 else -1
        s.log[n, 2] = i
        s.log[n, 3] = s.ints[i, c.USED] * s.rules[c.BLOCK] if i >= 0 else 0


@native
def stow(s: Arrays, r: int) -> None:
    """Takes a cache that leaves its GPU into the pool, if that has room."""
    tokens = s.rows[r, st.CACHED]
    host = s.rules[c.HOST_TOKENS] * s.rules[c.INSTANCES] - s.counts[c.HOST_USED]
    nvme = s.rules[c.NVME_TOKENS] * s.rules[c.INSTANCES] - s.counts[c.NVME_USED]
    where = cache_goes(tokens, host, nvme)
    s.rows[r, st.PLACE] = where
    if where == policy.ON_HOST:
        s.counts[c.HOST_USED] += tokens
        s.counts[c.HOST_PEAK] = max(s.counts[c.HOST_PEAK], s.counts[c.HOST_USED])
    elif where == policy.ON_NVME:
        s.counts[c.NVME_USED] += tokens
    else:
        s.rows[r, st.CACHED] = 0


@native
def unstow(s: Arrays, r: int) -> None:
    """Frees the room of a cache in the pool."""
    if s.rows[r, st.PLACE] == policy.ON_HOST:
        s.counts[c.HOST_USED] -= s.rows[r, st.CACHED]
    elif s.rows[r, st.PLACE] == policy.ON_NVME:
        s.counts[c.NVME_USED] -= s.rows[r, st.CACHED]


@native
def rest(s: Arrays, i: int, r: int) -> None:
    """Leaves the cache of an attempt that waits where it is."""
    append(s.rows, s.ints[i], c.IDLE_HEAD, c.IDLE_TAIL, st.BEFORE, st.AFTER, r)
    s.ints[i, c.IDLE_BLOCKS] += blocks(s, s.rows[r, st.CACHED])


@native
def unrest(s: Arrays, i: int, r: int) -> None:
    """Takes a waiting cache out of its list and gives its blocks back."""
    unlink(s.rows, s.ints[i], c.IDLE_HEAD, c.IDLE_TAIL, st.BEFORE, st.AFTER, r)
    s.ints[i, c.IDLE_BLOCKS] -= blocks(s, s.rows[r, st.CACHED])
    release(s, i, r, s.rows[r, st.CACHED])


@native
def evict(s: Arrays, i: int, r: int) -> None:
    """Takes the cache of a waiting attempt off the GPU."""
    unrest(s, i, r)
    stow(s, r)
    s.counts[c.EVICTIONS] += 1
    note(s, s.floats[i, c.NOTED_S], st.EVICT, r, i)
