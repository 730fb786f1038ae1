"""Entropies against counting by hand and against closed forms."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.executor.data.entropy import bigram_entropy, unigram_entropy

STREAM = st.lists(st.integers(0, 6), min_size=2, max_size=60)


@settings(max_examples=200, deadline=None)
@given(train=STREAM, held_out=STREAM)
def test_equal_counting_by_hand(train, held_out):
    vocab = 7
    singles, pairs = Counter(train), Counter(itertools.pairwise(train))
    firsts = Counter(train[:-1])
    targets = list(itertools.pairwise(held_out))
    unigram = [-math.log((singles[t] + 1) / (len(train) + vocab)) for _, t in targets]
    bigram = [-math.log((pairs[s, t] + 1) / (firsts[s] + vocab)) for s, t in targets]
    a, b = np.array(train, dtype=np.uint16), np.array(held_out, dtype=np.uint16)
    assert unigram_entropy(a, b, vocab) == pytest.approx(sum(unigram) / len(unigram), rel=1e-12)
    assert bigram_entropy(a, b, vocab) == pytest.approx(sum(bigram) / len(bigram), rel=1e-12)


def test_unseen_text_costs_the_logarithm_of_the_vocabulary():
    train, held_out = np.zeros(2, dtype=np.uint16), np.array([3, 4, 5])
    # nothing held out was seen: (0 + 1) / (2 + 10) and, after an unseen token, 1 / 10
    assert unigram_entropy(train, held_out, 10) == pytest.approx(math.log(12))
    assert bigram_entropy(train, held_out, 10) == pytest.approx(math.log(10))


def test_closed_form_of_a_long_periodic_text():
    n, period = 40_000, 8
    text = np.arange(n) % period
    assert unigram_entropy(text, text, period) == pytest.approx(math.log(period), rel=1e-3)
    # each token has one successor: p = (n/8 + 1) / (n/8 + 8)
    assert bigram_entropy(text, text, period) == pytest.approx(
        -math.log((n / 8 + 1) / (n / 8 + 8)), rel=0.05
    )


def test_sequences_count_their_targets_only():
    train = np.arange(20) % 5
    rows = np.array([[0, 1, 2], [4, 0, 1]])
    halves = [bigram_entropy(train, r, 5) for r in rows]
    assert bigram_entropy(train, rows, 5) == pytest.approx(sum(halves) / 2)
    assert unigram_entropy(train, rows, 5) == pytest.approx(
        unigram_entropy(train, np.array([9 % 5, 1, 2, 0, 1]), 5)
    )


def test_shuffled_text_cannot_be_predicted_from_its_neighbour():
    rng = np.random.default_rng(5)
    weights = rng.dirichlet(np.ones(40))
    text = rng.choice(40, 60_000, p=weights)
    train, held_out = text[:50_000], text[50_000:]
    unigram = unigram_entropy(train, held_out, 40)
    assert unigram == pytest.approx(-(weights * np.log(weights)).sum(), rel=0.02)
    assert bigram_entropy(train, held_out, 40) >= unigram
    ordered = np.sort(text)  # and order is seen where there is some
    assert bigram_entropy(ordered[::2], ordered[1::2], 40) < 0.1


def test_a_wide_vocabulary_needs_no_square_table():
    train = np.arange(0, 160_000, 7, dtype=np.uint32)
    assert bigram_entropy(train, train, 163_840) == pytest.approx(math.log(163_841 / 2), rel=1e-9)
