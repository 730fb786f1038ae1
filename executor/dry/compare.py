"""Where a dry run differs from the prediction of the same rank, field by field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

from flopwright.report.rank_step import Call, RankStep

MEMORY_TOLERANCE: Final = 0.01
# Classes that are tensors of their own; what only the fullest moment has is in the peak.
_CLASSES: Final = ("weights", "gradients", "optimizer_state", "activations")
# FLOPs of a long step are sums of more than 2^53 by floating point.
_FLOPS_TOLERANCE: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same.

    Attributes:
        field: what; "calls[3]" is the fourth entry of the list.
        predicted, recorded: both values as text, "nothing" where a list has ended.
    """

    field: str
    predicted: str
    recorded: str

    def to_data(self) -> dict[str, str]:
        """Returns plain data."""
        return {
            "field": self.field,
            "predicted": self.predicted,
            "recorded": self.recorded,
        }


def compare(
    predicted: RankStep, recorded: RankStep, *, whole: bool = True
) -> tuple[Difference, ...]:
    """Returns every difference; lists are compared entry by entry, their first one told.

    Actions, communication and products must be equal, in order where they have one; memory
    may differ by MEMORY_TOLERANCE, by class and at the fullest moment.

    Args:
        whole: False for a step shorter than its pipeline, which is never at its fullest: a
            prediction takes it that activations meet gradients.
    """
    return (
        *_lists("actions", predicted.actions, recorded.actions),
        *_lists("calls", predicted.calls, recorded.calls),
        *_products(predicted, recorded),
        *_memory(predicted, recorded, whole),
    )


def _lists(field: str, predicted: Sequence[Any], recorded: Sequence[Any]) -> Iterator[Difference]:
    pairs = enumerate(zip_longest(predicted, recorded))
    unequal = [(i, a, b) for i, (a, b) in pairs if a != b]
    if unequal:
        i, a, b = unequal[0]
        yield Difference(f"{field}[{i}]", _show(a), _show(b))
    if len(unequal) > 1:
        yield Difference(
            f"{field}, entries that differ", str(len(unequal)), f"of {len(recorded)} recorded"
        )


def _show(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Call):
        ranks = value.ranks
        among = f"{ranks[0]}..{ranks[-1]} ({len(ranks)})" if len(ranks) > 2 else str(list(ranks))
        return f"{value.action}: {value.collective} of {value.nbytes:,} bytes among {among}"
    return str(value)


def _products(predicted: RankStep, recorded: RankStep) -> Iterator[Difference]:
    for product in sorted({*predicted.products, *recorded.products}):
        a, b = predicted.products.get(product, 0), recorded.products.get(product, 0)
        if a != b:
            shape = f"m {product.m}, k {product.k}, n {product.n}, batch {product.batch}"
            name = f"{product.action} {product.kernel} {product.dtype} ({shape})"
            yield Difference(name, f"{a} times", f"{b} times")
    for kernel in sorted({*predicted.flops, *recorded.flops}):
        x, y = predicted.flops.get(kernel, 0.0), recorded.flops.get(kernel, 0.0)
        if abs(x - y) > _FLOPS_TOLERANCE * max(x, y):
            yield Difference(f"FLOPs of {kernel}", f"{x:.6e}", f"{y:.6e}")


def _memory(predicted: RankStep, recorded: RankStep, whole: bool) -> Iterator[Difference]:
    one, other = predicted.memory_bytes, recorded.memory_bytes
    pairs = [(f"memory, {name}", one.get(name, 0), other.get(name, 0)) for name in _CLASSES]
    if whole:
        pairs.append(("memory, peak", predicted.peak_bytes, recorded.peak_bytes))
    for field, a, b in pairs:
        if abs(a - b) > MEMORY_TOLERANCE * b:
            more = f"{(a - b) / b:+.2%}" if b else "nothing recorded"
            yield Difference(field, f"{a:,} bytes ({more})", f"{b:,} bytes")
