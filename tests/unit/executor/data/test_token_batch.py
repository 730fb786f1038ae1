"""Packed rows: documents stand whole, positions and bounds are theirs, weights are kept."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.executor.data.order import DocumentStarts, packed_batch
from flopwright.executor.data.token_batch import (
    Document,
    document_bounds,
    joined,
    pack,
    positions_in_documents,
)

DOCUMENTS = st.lists(st.integers(2, 13), min_size=1, max_size=25)


def made(lengths: list[int]) -> list[Document]:
    """Document i has the tokens 100 i, 100 i + 1, ..."""
    return [
        Document(tokens=list(range(100 * i, 100 * i + n)), weights=[i + 0.5] * (n - 1))
        for i, n in enumerate(lengths, 1)
    ]


@settings(max_examples=100, deadline=None)
@given(DOCUMENTS)
def test_documents_stand_whole_and_the_rest_is_left_out_of_the_loss(lengths: list[int]) -> None:
    documents = made(lengths)
    rows = pack(documents, 12, pad_id=7)
    assert rows.starts is not None
    assert rows.weights is not None
    positions = positions_in_documents(rows.starts)
    seen = []
    for tokens, starts, weights, places in zip(
        rows.tokens, rows.starts, rows.weights, positions, strict=True
    ):
        assert starts[0]
        begin = [*np.flatnonzero(starts), len(starts)]
        for first, end in pairwise(begin):
            assert places[first:end].tolist() == list(range(end - first))
            if tokens[first] == 7:
                assert not weights[first:end].any()
                continue
            number = tokens[first] // 100
            document = documents[number - 1]
            length = len(document.tokens)
            assert tokens[first : first + length].tolist() == document.tokens
            assert weights[first : first + length - 1].tolist() == document.weights
            assert not weights[first + length - 1 : end].any()
            seen.append(number)
    assert sorted(seen) == list(range(1, len(documents) + 1))
    assert rows.total_weight == sum(sum(d.weights or ()) for d in documents)
    assert len(rows) * 13 >= sum(lengths)


def test_short_documents_share_a_row() -> None:
    rows = pack(made([7, 6, 13, 5, 8]), 12, pad_id=0)
    assert len(rows) == 3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
    st.integers(1, 15),
    st.lists(st.integers(0, 400), min_size=1, max_size=6),
)
def test_starts_in_a_ring_are_those_counted_one_by_one(
    lengths: list[int], length: int, first: list[int]
) -> None:
    size = sum(lengths)
    places = np.cumsum([0, *lengths[:-1]])
    begins = np.zeros(size, dtype=bool)
    begins[places] = True
    starts = DocumentStarts(places.astype(np.int64), size)
    index = (np.array(first)[:, None] + np.arange(length)) % size
    asked = np.array(first, dtype=np.int64)
    assert np.array_equal(starts.rows(asked, length), begins[index])
    assert np.array_equal(starts.counts(asked, length), begins[index].sum(1))


def test_no_token_is_asked_for_the_first_of_the_next_document() -> None:
    starts = np.array([[False, False, True, False, True]])
    rows = packed_batch(np.arange(5)[None], starts, 2.0)
    assert rows.starts is not None
    assert rows.weights is not None
    assert rows.starts.tolist() == [[True, False, True, False]]
    assert rows.weights.tolist() == [[1, 0, 1, 0]]
    assert document_bounds(rows.starts) == (0, 2, 4)
    both = joined([rows, rows])
    assert both.starts is not None
    assert document_bounds(both.starts) == (0, 2, 4, 6, 8)
    assert both.tokens.shape == (2, 5)
