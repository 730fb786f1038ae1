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


def rows(statuses: list[int]) -> np.ndarray:
    out = policy.new_attempts(100, len(statuses), 4, 3)
    out["status"] = statuses
    return out


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


def test_new_attempts_stand_in_prompt_order_and_may_split_a_prompt():
    first = policy.new_attempts(0, 6, 4, 0)
    rest = policy.new_attempts(6, 6, 4, 1)
    prompts = np.concatenate([first, rest])["prompt"]
    assert prompts.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert set(rest["submitted"].tolist()) == {1}
    assert set(first["first"].tolist()) == {-1}


def test_parked_resume_first_oldest_first_then_new_in_order():
    p, q, r, d = policy.PARKED, policy.QUEUED, policy.RUNNING, policy.DONE
    assert policy.admission_order(rows([q, p, d, p, q, r])).tolist() == [1, 3, 0, 4]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 40))
def test_place_fills_the_emptiest_instance_first(free, waiting):
    got = policy.place(waiting, np.array(free, dtype=np.int64)).tolist()
    load = [0] * len(free)
    want = []
    for _ in range(min(waiting, sum(free))):
        index = min((i for i in range(len(free)) if load[i] < free[i]), key=lambda i: (load[i], i))
        load[index] += 1
        want.append(index)
    assert got == want


def test_strict_ties_count_no_more_than_needed():
    assert policy.count_completions(5, 7, 10, strict=True) == 3
    assert policy.count_completions(5, 10, 10, strict=True) == 0
    assert policy.count_completions(5, 7, 10, strict=False) == 5


def test_park_keeps_tokens_and_requeues_what_has_none():
    attempts = rows([policy.RUNNING, policy.RUNNING, policy.DONE, policy.QUEUED])
    attempts["tokens"] = [7, 0, 9, 0]
    attempts["first"] = [2, 3, 2, -1]
    policy.park(attempts)
    assert attempts["status"].tolist() == [
        policy.PARKED,
        policy.QUEUED,
        policy.DONE,
        policy.QUEUED,
    ]
    assert attempts["tokens"].tolist() == [7, 0, 9, 0]
    assert attempts["first"].tolist() == [2, -1, 2, -1]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 8), max_size=30), st.integers(1, 4))
def test_a_prompt_goes_only_with_all_its_samples(prompts, samples):
    prompts = [p for i, p in enumerate(prompts) if prompts[:i].count(p) < samples]
    got = policy.dispatch(np.array(prompts, dtype=np.int64), samples).tolist()
    assert got == sorted({p for p in prompts if prompts.count(p) == samples})


def test_the_policy_never_sees_a_length():
    """A real engine cannot know how long an attempt becomes: no such field, no such name."""
    assert set(policy.ATTEMPT.names) == {
        "id", "prompt", "status", "tokens", "submitted", "first",
    }  # fmt: skip
    tree = ast.parse(Path(policy.__file__).read_text())
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert not {n for n in names if "length" in n or "remaining" in n}
