"""1F1B (PipeDream-flush, arXiv 2104.04473): warm-up forwards, then one forward one backward."""

from __future__ import annotations

from flopwright.plan.schedules.actions import Action, ActionKind


def one_f_one_b(stage: int, pp: int, num_microbatches: int) -> tuple[Action, ...]:
    """Returns the compute actions of `stage`; at most pp - stage micro-batches are in flight."""
    warmup = min(pp - stage - 1, num_microbatches)
    out = [Action(ActionKind.FORWARD, stage, m) for m in range(warmup)]
    for m in range(warmup, num_microbatches):
        out.append(Action(ActionKind.FORWARD, stage, m))
        out.append(Action(ActionKind.BACKWARD, stage, m - warmup))
    out.extend(
        Action(ActionKind.BACKWARD, stage, m)
        for m in range(num_microbatches - warmup, num_microbatches)
    )
    return tuple(out)
