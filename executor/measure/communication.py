"""What travelled in a step: each collective, message and copy by name, from the ranks' traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flopwright.executor.measure.timers import StepTrace, without_waiting
from flopwright.plan.mesh import Mesh

_NOT_MOVING = frozenset({"forward", "backward", "recompute", "optimizer", "host", "idle"})


@dataclass(slots=True)
class Travelled:
    """A kind of message of a step: of one rank, the mean over ranks.

    Attributes:
        count: how often.
        nbytes: bytes in all, as the actions state them.
        seconds: from the last partner's arrival to the end.
        waiting_s: before that, since this rank's own arrival.
    """

    count: float = 0.0
    nbytes: float = 0.0
    seconds: float = 0.0
    waiting_s: float = 0.0

    def rounded(self) -> dict[str, float]:
        """Returns it as plain data."""
        return {
            "count": round(self.count, 3),
            "bytes": round(self.nbytes),
            "seconds": self.seconds,
            "waiting_s": self.waiting_s,
        }


def travelled(steps: Sequence[StepTrace], mesh: Mesh) -> dict[str, Travelled]:
    """Returns what moved in a step by name without micro-batch numbers: SEND_F, ep_dispatch.

    Args:
        steps: the ranks' traces of one step on one machine's clock.
    """
    out: dict[str, Travelled] = {}
    share = 1.0 / len(steps)
    for whole, cut in zip(steps, without_waiting(steps, mesh), strict=True):
        for event, clipped in zip(whole.events, cut.events, strict=True):
            if event.cls in _NOT_MOVING:
                continue
            found = out.setdefault(event.name.split("(", 1)[0], Travelled())
            found.count += share
            found.nbytes += share * event.nbytes
            found.seconds += share * (clipped.end_s - clipped.start_s)
            found.waiting_s += share * (clipped.start_s - event.start_s)
    return out
