"""The round policy: who runs, when a round ends, what is dispatched."""

from __future__ import annotations

import ast
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.plan import rollout as policy
from flopwright.plan import rollout_choices as choices


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 100))
def test_stop_count_is_the_exact_ceiling(attempts, percent):
    exact = math.ceil(Fraction(percent, 100) * attempts)
    assert policy.stop_count(attempts, percent / 100) == exact


@pytest.mark.parametrize(
    ("attempts", "fraction", "count"),
    [(10, 0.7, 7), (10, 0.71, 8), (10, 1e-6, 1), (2048, 0.9, 1844), (3, 1.0, 3)],
)
def test_stop_count_examples(attempts, fraction, count):
    assert policy.stop_count(attempts, fraction) == count


def test_parked_resume_first_oldest_first_then_new_in_order():
    tokens = [0, 7, 0, 3]
    keys = [
        (choices.queue_key(choices.FIFO, t > 0, t, 0, False, 0), i) for i, t in enumerate(tokens)
    ]
    assert [i for _, i in sorted(keys)] == [1, 3, 0, 2]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 99)), min_size=1))
def test_longest_first_goes_by_what_is_thought_to_be_left(rows):
    keys = [choices.queue_key(choices.LONGEST_FIRST, t > 0, t, e, False, 0) for t, e in rows]
    left = [max(e - t, 0) for t, e in rows]
    assert keys == [-x for x in left]


def test_probes_go_first_then_prompts_of_which_nothing_is_seen_then_by_the_longest_seen():
    def key(tokens, probe, seen):
        return choices.queue_key(choices.PROBE, tokens > 0, tokens, 0, probe, seen)

    order = [
        key(0, True, 0),
        key(0, False, 0),
        key(0, False, 900),
        key(500, True, 900),
        key(0, True, 9),
    ]
    assert order == sorted(order)
    assert len(set(order)) == 5


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=6))
def test_the_emptiest_open_instance_takes_the_next(instances):
    running, open_ = zip(*instances, strict=True)
    got = choices.least_loaded(running, open_)
    allowed = [i for i, is_open in enumerate(open_) if is_open]
    assert got == min(allowed, key=lambda i: (running[i], i), default=-1)


def test_strict_ties_count_nothing_once_the_round_is_over():
    assert choices.counts_now(strict=True, over=False)
    assert not choices.counts_now(strict=True, over=True)
    assert choices.counts_now(strict=False, over=True)
    assert choices.round_over(9, 9, 0)
    assert not choices.round_over(9, 9, 1)
    assert not choices.round_over(8, 9, 0)


def test_room_is_counted_with_what_can_be_evicted_and_with_the_next_step():
    assert choices.fits(3, 4, 90, 10, 0, 0, 100)
    assert not choices.fits(3, 4, 90, 10, 1, 0, 100)
    assert choices.fits(3, 4, 90, 10, 1, 1, 100)
    assert not choices.fits(4, 4, 0, 1, 0, 0, 100)
    assert choices.fits(0, 4, 99, 100, 0, 0, 100)  # whatever waits there makes room


def test_throttle():
    assert choices.throttle_admits(0, 1.0, 100, 50, 90)  # an empty instance always may
    assert not choices.throttle_admits(3, 3.0, 0, 1, 90)
    assert not choices.throttle_admits(3, 9.0, 80, 11, 90)
    assert choices.throttle_admits(3, 9.0, 80, 10, 90)
    assert choices.limit_after_preemption(20, 0.75) == 15
    assert choices.limit_after_preemption(1, 0.5) == 1
    assert choices.limit_after_completion(15, 1.0, 3, 10, 80) == 16
    assert choices.limit_after_completion(15, 1.0, 0, 10, 80) == 15
    assert choices.limit_after_completion(15, 1.0, 3, 80, 80) == 15


def test_a_cache_spills_from_the_host_to_nvme_to_nowhere():
    assert choices.cache_goes(5, 5, 0) == choices.ON_HOST
    assert choices.cache_goes(6, 5, 6) == choices.ON_NVME
    assert choices.cache_goes(7, 5, 6) == choices.NOWHERE


def test_too_old_is_beyond_the_limit_and_never_what_has_no_token():
    first = np.array([-1, 0, 3, 4, 5])
    assert policy.too_old(first, 5, 1).tolist() == [False, True, True, False, False]
    versions, tokens = np.array([1, 3, 4]), np.array([10, 20, 30])
    assert policy.masked_tokens(versions, tokens, 5, 1) == 30
    assert policy.masked_tokens(versions, tokens, 5, 4) == 0


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 8), max_size=30), st.integers(1, 4))
def test_a_prompt_goes_only_with_all_its_samples(prompts, samples):
    prompts = [p for i, p in enumerate(prompts) if prompts[:i].count(p) < samples]
    got = policy.dispatch(np.array(prompts, dtype=np.int64), samples).tolist()
    assert got == sorted({p for p in prompts if prompts.count(p) == samples})


def test_the_policy_never_sees_a_length():
    """A real engine cannot know how long an attempt becomes: no such name, but an estimate."""
    for module in (policy, choices):
        tree = ast.parse(Path(module.__file__).read_text())
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        names |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
        assert not {n for n in names if "length" in n or "remaining" in n or "total" in n}


def test_choices_stand_alone_so_that_each_compiles():
    tree = ast.parse(Path(choices.__file__).read_text())
    defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    calls = {
        n.func.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    assert calls <= {"max", "range", "len"}
    assert not calls & defined


def test_the_shortest_contexts_move_to_engines_that_are_lent():
    contexts = np.array([50, 10, 40, 10, 30])
    assert policy.lent(contexts, 3).tolist() == [1, 3, 4]  # of equals the older first
    assert policy.lent(contexts, 0).tolist() == policy.lent(contexts, -2).tolist() == []
    assert sorted(policy.lent(contexts, 9).tolist()) == [0, 1, 2, 3, 4]
