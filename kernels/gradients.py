"""Which gradients the ops of a backward pass compute: all, or only one side of a split one.

Autograd tells an op which of its inputs require a gradient, not for which of them this pass
asks. A pipeline schedule that splits the backward pass asks first for the gradients of
activations, later for those of weights; an op that has both heeds this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum


class Wanted(Enum):
    """What the running backward pass is for."""

    ALL = "all"
    INPUT = "input"
    WEIGHT = "weight"


_wanted = Wanted.ALL  # not a thread's own: GPUs' backward passes run in autograd's threads


@contextmanager
def computing_only(wanted: Wanted) -> Iterator[None]:
    """Has ops compute one side's gradients inside; one backward pass runs at a time."""
    global _wanted
    before, _wanted = _wanted, wanted
    try:
        yield
    finally:
        _wanted = before


def input_wanted() -> bool:
    """Returns whether the gradients of activations are asked for."""
    return _wanted is not Wanted.WEIGHT


def weight_wanted() -> bool:
    """Returns whether the gradients of weights are asked for."""
    return _wanted is not Wanted.INPUT
