"""Ends a run whose loss, gradients or weights stop being numbers, before that is saved."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from flopwright.errors import InputError, Violation
from flopwright.executor.parallel.groups import gather_bytes
from flopwright.executor.train.collect import StepRow
from flopwright.executor.train.spikes import Spike, spike_in
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
    for row, record in zip(rows, records, strict=True):
        spike = spike_in(row.step, row.loss, row.gradient_norm, ())
        if spike is not None:
            raise refusal(
                trial,
                spike,
                own_losses(trial, record),
                "nothing of it has been saved: resume from the checkpoint before it with a lower "
                "learning rate, or let --max-rollbacks leave its data out",
            )


def not_finite(trial: Trial) -> dict[int, str]:
    """Returns by rank the first weight that is not finite there, of ranks with one; collective.

    An update can spoil weights whose loss and gradients were still numbers.
    """
    parts = trial.data_parallel.state_parts()
    mine = next((p.held.name for p in parts if not bool(p.updated.isfinite().all())), None)
    told = gather_bytes(json.dumps(mine).encode(), trial.groups.world, trial.device)
    found = {rank: json.loads(data) for rank, data in enumerate(told)}
    return {rank: str(name) for rank, name in found.items() if name is not None}


def unsavable(trial: Trial, found: Mapping[int, str], steps: int) -> InputError:
    """Returns the error that ends a run whose weights are not finite after `steps` steps."""
    ranks = ", ".join(map(str, found))
    plural = "" if len(found) == 1 else "s"
    return InputError(
        Violation(
            field=next(iter(found.values())),
            rule=f"is not finite on rank{plural} {ranks} after {steps} steps of plan "
            f"'{trial.entry.name}'",
            nearest_fix="this has not been saved: resume from the checkpoint before it with a "
            "lower learning rate, or let --max-rollbacks leave its data out",
        )
    )


def own_losses(trial: Trial, record: StepRecord) -> dict[int, float]:
    """Returns the loss of each rank's own micro-batches, of ranks that know one; collective."""
    mine = None if record.loss is None else float(record.loss)
    told = gather_bytes(json.dumps(mine).encode(), trial.groups.world, trial.device)
    found = {rank: json.loads(data) for rank, data in enumerate(told)}
    return {rank: float(loss) for rank, loss in found.items() if loss is not None}


def spike_text(spike: Spike, plan: str, own: Mapping[int, float]) -> str:
    """Returns in which step of which plan it is, whose own loss it is, and beside what."""
    out = [r for r, loss in own.items() if not math.isfinite(loss) or loss > spike.bound]
    ranks = ", ".join(map(str, out))
    plural = "" if len(out) == 1 else "s"
    where = f" (its own on rank{plural} {ranks})" if out and spike.what == "loss" else ""
    at = f"in step {spike.step} of plan '{plan}'{where}"
    if spike.median is None:
        return f"is not finite {at}"
    return (
        f"is a spike {at}: the median of the steps before it is {spike.median:.4g}, "
        f"their scatter {spike.scatter:.2g}"
    )


def refusal(trial: Trial, spike: Spike, own: Mapping[int, float], fix: str) -> InputError:
    """Returns the error that ends a run at a spike."""
    return InputError(
        Violation(
            field=spike.what,
            value=f"{spike.value:.6g}",
            rule=spike_text(spike, trial.entry.name, own),
            nearest_fix=fix,
        )
    )
