"""A run goes back to before a loss spike, and leaves out the data that it came from.

The batch of the step that shows the spike, or the update by the one before it, is the cause; both
are left out, and the samples behind them move up. What was left out, and the losses that the next
one is held against, are part of a checkpoint: a run that is killed and resumed goes the same way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from flopwright.executor.checkpoint.manifest import steps_of
from flopwright.executor.checkpoint.save import discard_after
from flopwright.executor.data.skips import Spans, with_kept_skipped
from flopwright.executor.launch.progress import Progress, note
from flopwright.executor.launch.request import ROLLBACKS_FILE, RunRequest, checkpoint_dir
from flopwright.executor.train.collect import StepRow
from flopwright.executor.train.guard import own_losses, refusal, spike_text
from flopwright.executor.train.saves import Saves, go_on
from flopwright.executor.train.spikes import WINDOW, Spike, spike_in
from flopwright.executor.train.trial import StepRecord, Trial

# Batches that are left out: the spike's and those before it whose update it may show.
SKIPPED_STEPS: Final = 2


@dataclass(slots=True)
class Memory:
    """What one plan of a run remembers of its past; equal on every rank.

    Attributes:
        losses: of the last steps, nats a token.
        skipped: samples that are left out.
        rollbacks: how often it went back.
    """

    losses: list[float] = field(default_factory=list)
    skipped: Spans = ()
    rollbacks: int = 0

    def to_state(self) -> dict[str, Any]:
        """Returns it as a checkpoint keeps it."""
        return {
            "losses": self.losses[-WINDOW:],
            "skipped_samples": [list(span) for span in self.skipped],
            "rollbacks": self.rollbacks,
        }

    def look(self, rows: Sequence[StepRow]) -> int | None:
        """Takes a turn's losses up to the first spike; returns which row that is, if any."""
        for i, row in enumerate(rows):
            if spike_in(row.step, row.loss, row.gradient_norm, self.losses) is not None:
                return i
            self.remember([row.loss])
        return None

    def remember(self, losses: Sequence[float]) -> None:
        """Takes the losses of further steps."""
        self.losses = [*self.losses, *losses][-WINDOW:]


def memory_of(state: dict[str, Any]) -> Memory:
    """Returns what a checkpoint's state says; one without knows of nothing."""
    return Memory(
        losses=[float(x) for x in state.get("losses", ())],
        skipped=tuple((int(a), int(b)) for a, b in state.get("skipped_samples", ())),
        rollbacks=int(state.get("rollbacks", 0)),
    )


@dataclass(slots=True)
class Recovery:
    """What leads the plans of a run back.

    Attributes:
        memories: one a plan.
    """

    request: RunRequest
    out_dir: Path
    say: Progress
    memories: list[Memory]

    def state_of(self, entry: int) -> dict[str, Any]:
        """Returns what a checkpoint of a plan keeps."""
        return self.memories[entry].to_state()

    def take(self, entry: int, trial: Trial, state: dict[str, Any]) -> None:
        """Goes on from what a checkpoint kept."""
        self.memories[entry] = memory_of(state)
        if self.memories[entry].skipped:
            trial.set_skipped(self.memories[entry].skipped)

    def roll_back(
        self,
        entry: int,
        trial: Trial,
        saves: Saves,
        turn: tuple[Sequence[StepRow], Sequence[StepRecord], int],
    ) -> int:
        """Lets a plan go on from the checkpoint before a spike; returns its step. Collective.

        Args:
            turn: the steps of a turn as all ranks saw them, as this rank did, and which of them
                is the spike.

        Raises:
            InputError: it has gone back often enough, or there is nothing to go back to.
        """
        rows, records, bad = turn
        memory, row = self.memories[entry], rows[bad]
        spike = spike_in(row.step, row.loss, row.gradient_norm, memory.losses)
        assert spike is not None
        own = own_losses(trial, records[bad])
        saves.settle(entry)
        first = max(0, spike.step + 1 - SKIPPED_STEPS)
        folder = self.out_dir / checkpoint_dir(trial.entry.name)
        back = _agreed(_last_until(folder, first), trial)
        if memory.rollbacks >= self.request.max_rollbacks or back == 0:
            fix = "there is no checkpoint before it" if back == 0 else (
                f"it has gone back {memory.rollbacks} times: look at its data and learning rate"
            )  # fmt: skip
            raise refusal(trial, spike, own, fix)
        done = memory.rollbacks + 1
        spans = (trial.dataset.first_sample(first), trial.dataset.first_sample(spike.step + 1))
        skipped = with_kept_skipped(memory.skipped, *spans)
        if dist.get_rank() == 0:
            discard_after(folder, back)
        self.take(entry, trial, go_on(trial, self.out_dir, back).state)
        self.memories[entry].skipped, self.memories[entry].rollbacks = skipped, done
        trial.set_skipped(skipped)
        saves.went_back(entry, back)
        if dist.get_rank() == 0:
            self._tell(entry, trial, spike, own, back)
        return back

    def _tell(
        self, entry: int, trial: Trial, spike: Spike, own: dict[int, float], back: int
    ) -> None:
        memory = self.memories[entry]
        text = (
            f"{spike.what} {spike.value:.4g} {spike_text(spike, trial.entry.name, own)}. Going "
            f"back to the checkpoint of {back} steps and leaving out the data of steps "
            f"{max(0, spike.step + 1 - SKIPPED_STEPS)} to {spike.step} "
            f"(rollback {memory.rollbacks} of {self.request.max_rollbacks})"
        )
        line = {
            "plan": trial.entry.name,
            "step": spike.step,
            "what": spike.what,
            "value": _plain(spike.value),
            "median": spike.median,
            "scatter": spike.scatter,
            "own_losses": {str(rank): _plain(loss) for rank, loss in own.items()},
            "back_to": back,
            "skipped_samples": [list(span) for span in memory.skipped],
        }
        with (self.out_dir / ROLLBACKS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.say(note(text))


def _plain(value: float) -> float | str:
    """Returns a number as JSON has it; it has none that are not finite."""
    return value if math.isfinite(value) else str(value)


def _last_until(folder: Path, step: int) -> int:
    """Returns the last checkpoint of at most so many steps; 0 for none."""
    return max((s for s in steps_of(folder) if s <= step), default=0)


def _agreed(value: int, trial: Trial) -> int:
    """Returns rank 0's value on every rank: not all may see the same folder at once."""
    tensor = torch.tensor([value if dist.get_rank() == 0 else 0], device=trial.device)
    return int(trial.groups.world.sum_(tensor))
