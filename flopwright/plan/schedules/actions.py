"""The actions a pipeline schedule is made of."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class ActionKind(StrEnum):
    """What a rank does; the first four compute, the rest move data."""

    FORWARD = "F"
    BACKWARD = "B"  # input and weight gradients together
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    REDUCE_GRADIENTS = "REDUCE_GRAD"
    OPTIMIZER_STEP = "OPTIM"


COMPUTE_KINDS = frozenset(
    {
        ActionKind.FORWARD,
        ActionKind.BACKWARD,
        ActionKind.BACKWARD_INPUT,
        ActionKind.BACKWARD_WEIGHT,
    }
)


class Action(NamedTuple):
    """One entry of a rank's list.

    Attributes:
        kind: what is done.
        chunk: pipeline chunk (0 .. pp*vpp-1) it belongs to; -1 for actions of the whole rank.
        microbatch: micro-batch index; -1 for actions of the whole step.
        peer: the other rank's stage for sends and receives; -1 otherwise.
    """

    kind: ActionKind
    chunk: int = -1
    microbatch: int = -1
    peer: int = -1

    def __str__(self) -> str:
        tail = f"({self.chunk},{self.microbatch})" if self.chunk >= 0 else ""
        return f"{self.kind.value}{tail}"
