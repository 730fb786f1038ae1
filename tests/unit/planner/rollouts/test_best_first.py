"""Best-first search against simulating everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwright.planner.rollouts.best_first import Reached, best_first, between, front_of

POINTS = st.lists(
    st.tuples(
        st.integers(0, 20),  # what it reaches
        st.integers(0, 5),  # what its bound is above that
        st.integers(0, 6),  # its level
        st.integers(0, 2),  # what its least level is below that
        st.booleans(),
    ),
    min_size=1,
    max_size=40,
)


def _explore(points, **options):
    truth = [Reached(float(v), float(level), counts) for v, _, level, _, counts in points]
    asked = []

    def simulate(index):
        asked.append(index)
        return truth[index]

    found = best_first(
        np.array([v + above for v, above, *_ in points], float),
        np.array([level - below for _, _, level, below, _ in points], float),
        simulate,
        **options,
    )
    return truth, asked, found


@pytest.mark.slow
@given(POINTS)
def test_best_and_front_are_those_of_brute_force(points):
    truth, asked, found = _explore(points)
    everything = dict(enumerate(truth))

    def corners(reached):
        return [(reached[i].level, reached[i].value) for i in front_of(reached)]

    assert corners(found.reached) == corners(everything)
    assert found.complete
    assert sorted([*asked, *found.ruled_out]) == list(range(len(points)))
    assert len(asked) == len(set(asked))


@given(POINTS)
def test_front_is_what_nothing_dominates(points):
    reached = {i: Reached(float(v), float(lv), c) for i, (v, _, lv, _, c) in enumerate(points)}
    counted = [r for r in reached.values() if r.counts]
    front = [reached[i] for i in front_of(reached)]
    for r in front:
        assert not any(
            o.value >= r.value and o.level <= r.level and (o.value, o.level) != (r.value, r.level)
            for o in counted
        )
    for r in counted:
        assert any(f.value >= r.value and f.level <= r.level for f in front)


def test_a_tight_bound_saves_simulations():
    points = [(v, 0, 0, 0, True) for v in range(50)]
    _, asked, found = _explore(points)
    assert asked == [49]
    assert len(found.ruled_out) == 49


def test_time_that_ends_leaves_the_rest_and_says_so():
    ticks = itertools.count()
    points = [(10, 5, 0, 0, True), (12, 2, 0, 0, True), (1, 12, 0, 0, True), (2, 1, 0, 0, True)]
    _, asked, found = _explore(points, time_limit_s=0.5, clock=lambda: next(ticks))
    assert asked == [0]
    assert set(found.left) == {1, 2}
    assert found.ruled_out == (3,)
    assert not found.complete


@pytest.mark.parametrize(
    ("chosen", "expected"), [(0.5, (0.4, 0.75)), (0.3, (0.4,)), (1.0, (0.75,))]
)
def test_points_between_neighbours(chosen, expected):
    assert between([1.0, 0.3, 0.5, 0.5], chosen) == pytest.approx(expected)
