"""Heaps and lists of attempts, linked through their rows: nothing is allocated in the loop."""

from __future__ import annotations

import numpy as np

from flopwright.simulator.rollouts.compiled.columns import NEXT_S, Arrays, Floats, Ints
from flopwright.simulator.rollouts.compiled.jit import native
from flopwright.simulator.rollouts.state import CHILD, IN, KEY, PARENT, SIBLING


@native
def meld(rows: Ints, times: Floats, a: int, b: int) -> int:
    """Returns the root of two pairing heaps made one; lower keys first, ties by row."""
    first, second = times[a, KEY], times[b, KEY]
    if second < first or (second == first and b < a):
        a, b = b, a
    child = rows[a, CHILD]
    rows[b, SIBLING] = child
    if child >= 0:
        rows[child, PARENT] = b
    rows[b, PARENT] = a
    rows[a, CHILD] = b
    return a


@native
def merge_children(rows: Ints, times: Floats, child: int) -> int:
    """Returns the root of a row of siblings, melded in pairs and then together; -1: none."""
    done = -1
    while child >= 0:
        other = rows[child, SIBLING]
        after = -1
        rows[child, SIBLING] = rows[child, PARENT] = -1
        if other >= 0:
            after = rows[other, SIBLING]
            rows[other, SIBLING] = rows[other, PARENT] = -1
            child = meld(rows, times, child, other)
        rows[child, SIBLING] = done
        done, child = child, after
    root = -1
    while done >= 0:
        after = rows[done, SIBLING]
        rows[done, SIBLING] = -1
        root = done if root < 0 else meld(rows, times, root, done)
        done = after
    if root >= 0:
        rows[root, PARENT] = -1
    return root


@native
def push(rows: Ints, times: Floats, roots: Ints, heap: int, r: int, key: float) -> None:
    """Puts a row into a heap."""
    rows[r, CHILD] = rows[r, SIBLING] = rows[r, PARENT] = -1
    rows[r, IN] = heap
    times[r, KEY] = key
    root = roots[heap]
    roots[heap] = r if root < 0 else meld(rows, times, root, r)


@native
def pop(rows: Ints, times: Floats, roots: Ints, heap: int) -> int:
    """Returns the first row of a heap and takes it out."""
    r = roots[heap]
    roots[heap] = merge_children(rows, times, rows[r, CHILD])
    rows[r, IN] = -1
    return r


@native
def take_out(rows: Ints, times: Floats, roots: Ints, r: int) -> None:
    """Takes a row out of the heap it is in."""
    heap = rows[r, IN]
    if roots[heap] == r:
        pop(rows, times, roots, heap)
        return
    before, after = rows[r, PARENT], rows[r, SIBLING]
    if rows[before, CHILD] == r:
        rows[before, CHILD] = after
    else:
        rows[before, SIBLING] = after
    if after >= 0:
        rows[after, PARENT] = before
    below = merge_children(rows, times, rows[r, CHILD])
    if below >= 0:
        roots[heap] = meld(rows, times, roots[heap], below)
    rows[r, IN] = -1


@native
def append(rows: Ints, ends: Ints, head: int, tail: int, before: int, after: int, r: int) -> None:
    """Adds a row at the end of a list; `ends` holds its head and tail at these columns."""
    last = ends[tail]
    rows[r, before], rows[r, after] = last, -1
    if last >= 0:
        rows[last, after] = r
    else:
        ends[head] = r
    ends[tail] = r


@native
def unlink(rows: Ints, ends: Ints, head: int, tail: int, before: int, after: int, r: int) -> None:
    """Takes a row out of a list."""
    b, a = rows[r, before], rows[r, after]
    if b >= 0:
        rows[b, after] = a
    else:
        ends[head] = a
    if a >= 0:
        rows[a, before] = b
    else:
        ends[tail] = b


@native
def set_next(s: Arrays, i: int, next_s: float) -> None:
    """Sets when an instance has its next boundary, and who is first of all."""
    s.floats[i, NEXT_S] = next_s
    node = (i + s.tree.shape[0] // 2) // 2
    while node >= 1:
        a, b = s.tree[2 * node], s.tree[2 * node + 1]
        s.tree[node] = a
        if b >= 0 and s.floats[b, NEXT_S] < s.floats[a, NEXT_S]:
            s.tree[node] = b
        node //= 2


@native
def take_server(servers: Floats, until_s: float) -> None:
    """Replaces the smallest of a heap."""
    size, at = servers.shape[0], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and servers[child + 1] < servers[child]:
            child += 1
        if servers[child] >= until_s:
            break
        servers[at] = servers[child]
        at = child
    servers[at] = until_s


def new_tree(instances: int) -> Ints:
    """Returns the tree over instances, all with the same next boundary."""
    size = 1
    while size < instances:
        size *= 2
    tree = np.full(2 * size, -1, dtype=np.int64)
    tree[size : size + instances] = np.arange(instances)
    for node in range(size - 1, 0, -1):
        tree[node] = tree[2 * node]
    return tree
