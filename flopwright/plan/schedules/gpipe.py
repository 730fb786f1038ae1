"""GPipe (arXiv 1811.06965): all forwards, then all backwards."""

from __future__ import annotations

from flopwright.plan.schedules.actions import Action, ActionKind


def gpipe(stage: int, pp: int, num_microbatches: int) -> tuple[Action, ...]:
    """Returns the compute actions of `stage`; every micro-batch is in flight at once."""
    del pp
    forward = [Action(ActionKind.FORWARD, stage, m) for m in range(num_microbatches)]
    backward = [Action(ActionKind.BACKWARD, stage, m) for m in range(num_microbatches)]
    return (*forward, *backward)
