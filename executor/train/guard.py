"""Ends a run whose loss or gradients stop being numbers, before that is saved."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from flopwright.errors import InputError, Violation
from flopwright.executor.parallel.groups import gather_bytes
from flopwright.executor.train.collect import StepRow
from flopwright.executor.train.trial import StepRecord, Trial


def refuse_not_finite(
    trial: Trial, rows: Sequence[StepRow], records: Sequence[StepRecord]
) -> None:
    """Raises where a step's loss or gradient norm is not finite; the same on every rank.

    Args:
        rows: a turn's steps as all ranks saw them.
        records: the same steps on this rank.

    Raises:
        InputError: names the step, what is not finite, and the ranks whose loss is not.
    """
    bad = next((i for i, row in enumerate(rows) if not _finite(row)), None)
    if bad is None:
        return
    mine = records[bad].loss
    wrong = mine is not None and not math.isfinite(float(mine))
    told = gather_bytes(json.dumps(wrong).encode(), trial.groups.world, trial.device)
    ranks = [str(rank) for rank, data in enumerate(told) if json.loads(data)]
    row = rows[bad]
    what = "gradient norm" if math.isfinite(row.loss) else "loss"
    where = f" (its own on rank {', '.join(ranks)})" if ranks else ""
    raise InputError(
        Violation(
            field=what,
            value=str(row.loss if what == "loss" else row.gradient_norm),
            rule=f"is not finite in step {row.step} of plan '{trial.entry.name}'{where}",
            nearest_fix="nothing of it has been saved: resume from the checkpoint before it with "
            "a lower learning rate, or with other data",
        )
    )


def _finite(row: StepRow) -> bool:
    return math.isfinite(row.loss) and math.isfinite(row.gradient_norm)
