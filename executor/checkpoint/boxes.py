"""Where a rank's part of a tensor stands in the whole tensor, as boxes of indices.

What an optimizer holds of a weight is a run of its elements (a flat partition begins inside one
row and ends inside another), and tensor parallelism has cut the weight before. Both together
are a few boxes of the whole tensor, and boxes are what `torch.distributed.checkpoint` moves
between plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

# Along one dimension: (start here, start in the whole tensor, length), in order.
Intervals = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A box of a tensor of shape `full_shape` whose first element stands at `offsets`."""

    tensor: Tensor
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]


def whole(tensor: Tensor) -> TensorSlice:
    """Returns all of a tensor as one box."""
    return TensorSlice(tensor, tuple(tensor.shape), (0,) * tensor.ndim)


def run_boxes(
    shape: Sequence[int], first: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields (offsets, sizes) of boxes that make up elements first .. end of a tensor.

    In order, and each of them one piece of the flattened tensor: at most 2 ndim - 1 boxes.
    """
    if first >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    begin_row, begin = divmod(first, row)
    end_row, rest = divmod(end, row)
    inner = (0,) * (len(shape) - 1)
    if begin_row == end_row:
        for offsets, sizes in run_boxes(shape[1:], begin, rest):
            yield (begin_row, *offsets), (1, *sizes)
        return
    if begin:
        for offsets, sizes in run_boxes(shape[1:], begin, row):
            yield (begin_row, *offsets), (1, *sizes)
        begin_row += 1
    if end_row > begin_row:
        yield (begin_row, *inner), (end_row - begin_row, *shape[1:])
    if rest:
        for offsets, sizes in run_boxes(shape[1:], 0, rest):
            yield (end_row, *offsets), (1, *sizes)


def slices_of_run(
    flat: Tensor,
    first: int,
    shape: Sequence[int],
    intervals: Sequence[Intervals],
    full_shape: Sequence[int],
) -> Iterator[TensorSlice]:
    """Yields a run of elements as boxes of the whole tensor; their tensors are views of `flat`.

    Args:
        flat: elements first .. first + len(flat) of this rank's part, flattened.
        shape: of this rank's part.
        intervals: by dimension, where its indices stand in the whole tensor.
        full_shape: of the whole tensor.
    """
    done = 0
    for offsets, sizes in run_boxes(shape, first, first + flat.numel()):
        count = math.prod(sizes)
        box = flat[done : done + count].view(sizes)
        done += count
        parts = [
            _inside(offset, size, here)
            for offset, size, here in zip(offsets, sizes, intervals, strict=True)
        ]
        for chosen in product(*parts):
            view = box[tuple(slice(start, start + length) for start, _, length in chosen)]
            yield TensorSlice(view, tuple(full_shape), tuple(there for _, there, _ in chosen))


def _inside(offset: int, size: int, intervals: Intervals) -> list[tuple[int, int, int]]:
    """Returns (start in the box, start in the whole tensor, length) of what the box has."""
    found = []
    for here, there, length in intervals:
        begin, end = max(offset, here), min(offset + size, here + length)
        if begin < end:
            found.append((begin - offset, there + begin - here, end - begin))
    return found
