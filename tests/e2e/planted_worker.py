"""A rank of a run whose plans are slow or large where their names say so.

    torchrun planted_worker.py request.json

"slow-rank": all compute of rank 1 takes three times as long; "slow-backward": the backward passes
of all ranks do; "slow-traffic": every message of the gradients' reduction takes 0.1 s more;
"large-activations": every forward pass keeps much more than it needs. Real time passes and
real bytes are held: what measures and compares them is the product as it is.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.train import worker
from flopwright.executor.train.trial import Trial

COMPUTE = frozenset({"forward", "backward", "optimizer"})
# Numbers kept a token and number of its hidden state: several times what a pass needs.
EXTRA = 300
# By timer: which classes are stretched, how much, and by how many seconds more.
STRETCHED: dict[int, tuple[frozenset[str], float, float]] = {}


def stretch(timer: ActionTimer) -> None:
    """Works on until the open action has taken so many times as long, or so much more."""
    classes, factor, more_s = STRETCHED.get(id(timer), (frozenset(), 1.0, 0.0))
    if not timer._open or timer._open[-1][1] not in classes:
        return
    began = timer._open[-1][2]
    until = began + factor * (time.perf_counter() - began) + more_s
    while time.perf_counter() < until:
        pass


def stretching() -> None:
    """Makes timers stretch what was asked of them before they look at the clock."""
    begin, end = ActionTimer.begin, ActionTimer.end

    def slow_begin(self: ActionTimer, name: str, cls: str, nbytes: int = 0) -> None:
        stretch(self)
        begin(self, name, cls, nbytes)

    def slow_end(self: ActionTimer) -> None:
        stretch(self)
        end(self)

    ActionTimer.begin, ActionTimer.end = slow_begin, slow_end  # type: ignore[method-assign]


class Kept(torch.autograd.Function):
    """Saves numbers nobody reads: bytes are held until the backward pass, no time is spent."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(size))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def keep_more(trial: Trial) -> None:
    """Makes each chunk keep a tensor of its own for the backward pass."""
    for chunk in trial.chunks.values():

        def more(_: Any, inputs: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
            tokens = inputs[0].shape[0] * inputs[0].shape[1]
            return Kept.apply(out, EXTRA * tokens * trial.spec.hidden_size)

        chunk.register_forward_hook(more)


def plant(trial: Trial) -> Trial:
    """Returns the trial with what its name asks for."""
    name, timer = trial.entry.name, trial.timer
    rank = torch.distributed.get_rank()
    if name == "slow-rank" and rank == 1:
        STRETCHED[id(timer)] = COMPUTE, 3.0, 0.0
    elif name == "slow-backward":
        STRETCHED[id(timer)] = frozenset({"backward"}), 3.0, 0.0
    elif name == "slow-traffic":
        STRETCHED[id(timer)] = frozenset({"dp_comm"}), 1.0, 0.1
    elif name == "large-activations":
        keep_more(trial)
    return trial


if __name__ == "__main__":
    stretching()
    start = worker.start_trial
    worker.start_trial = lambda *args, **kwargs: plant(start(*args, **kwargs))
    sys.exit(worker.main(sys.argv[1:]))
