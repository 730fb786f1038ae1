"""The actions a pipeline schedule is made of."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class ActionKind(StrEnum):
    """What a rank does.

    The first five compute. RECOMPUTE makes again what a forward did not keep; it stands
    directly before the backward that needs it. OFFLOAD and FETCH move a micro-batch's saved
    activations to host memory and back, GATHER_WEIGHTS collects weights that data-parallel
    ranks hold in parts.
    """

    FORWARD = "F"
    BACKWARD = "B"  # input and weight gradients together
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECOMPUTE = "RECOMPUTE"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    OFFLOAD = "OFFLOAD"
    FETCH = "FETCH"
    GATHER_WEIGHTS = "GATHER_W"
    REDUCE_GRADIENTS = "REDUCE_GRAD"
    OPTIMIZER_STEP = "OPTIM"


# What a schedule's builder puts in order; plan/lower.py adds the rest.
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
        bucket: which part of the chunk's weights is gathered, or of its gradients reduced;
            -1 for all of them and for every other action.
        overlaps: the action is half of a pair, a forward and the backward next to it, that
            run at once: the one's communication behind the other's compute. Neither
            begins before both have their inputs.
    """

    kind: ActionKind
    chunk: int = -1
    microbatch: int = -1
    peer: int = -1
    bucket: int = -1
    overlaps: bool = False

    def __str__(self) -> str:
        tail = f"({self.chunk},{self.microbatch})" if self.chunk >= 0 else ""
        part = f"[{self.bucket}]" if self.bucket >= 0 else ""
        return f"{self.kind.value}{tail}{part}"
