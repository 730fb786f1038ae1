"""Which documents are held out: fixed by the documents' contents, not by their order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

HELD_OUT_SHARE: Final = 0.02
MIN_HELD_OUT_BYTES: Final = 16_384
MAX_HELD_OUT_SHARE: Final = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Documents to train on and documents held out.

    Attributes:
        rule: "document" (whole documents held out), "tail" (the end of the longest document
            held out, where there are too few documents) or "train" (a text too short to
            hold anything out: the training text itself is measured).
        duplicates: documents left out because an equal one stands before them.
    """

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    rule: str
    duplicates: int


def content_number(text: str) -> int:
    """Returns a document's place among 2^64 by its contents: equal ones have the same."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split_documents(documents: Sequence[str]) -> Split:
    """Returns the split: about 2 % of the text's bytes, at least 16 KiB, at most 10 %.

    Documents are drawn in the order of their sha256, so the split of a document depends on
    no other's position; equal documents are kept once, so none stands on both sides.
    """
    unique = tuple(dict.fromkeys(documents))
    duplicates = len(documents) - len(unique)
    sizes = [len(d.encode()) for d in unique]
    total = sum(sizes)
    wanted = max(HELD_OUT_SHARE * total, MIN_HELD_OUT_BYTES)
    order = sorted(range(len(unique)), key=lambda i: hashlib.sha256(unique[i].encode()).digest())
    drawn: set[int] = set()
    held = 0
    for i in order:
        if held >= wanted:
            break
        if held + sizes[i] <= MAX_HELD_OUT_SHARE * total:
            drawn.add(i)
            held += sizes[i]
    if held >= wanted:
        return Split(
            train=tuple(d for i, d in enumerate(unique) if i not in drawn),
            held_out=tuple(d for i, d in enumerate(unique) if i in drawn),
            rule="document",
            duplicates=duplicates,
        )
    return _split_tail(unique, sizes, wanted, duplicates)


def _split_tail(
    documents: tuple[str, ...], sizes: list[int], wanted: float, duplicates: int
) -> Split:
    longest = max(range(len(documents)), key=lambda i: sizes[i])
    if wanted > MAX_HELD_OUT_SHARE * sizes[longest]:
        return Split(train=documents, held_out=documents, rule="train", duplicates=duplicates)
    text = documents[longest]
    cut = round(len(text) * (1 - wanted / sizes[longest]))
    train = (*documents[:longest], text[:cut], *documents[longest + 1 :])
    return Split(train=train, held_out=(text[cut:],), rule="tail", duplicates=duplicates)
