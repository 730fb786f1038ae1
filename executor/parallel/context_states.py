"""Linear attention over runs of a sequence that several ranks hold (arXiv 2607.24653, 5.1.2).

Ranks keep the runs that full attention gave them (context.py): under ring and all_gather number
r and number 2 * size - 1 - r of a sequence, so that causal attention is even work. A recurrence
needs order, not neighbourhood: its state goes from run to run whoever holds them. So runs stand
beside each other as sequences of their own, each is summed up by what it makes of a state before
it, and one gather of the summaries lets every rank follow the chain through all runs. The
message is as large whatever the tokens; two runs a rank send twice what one would, which is less
than moving tokens between two layouts at every change of a layer's kind.

Short convolutions read the last inputs of the run before, and their gradients go back there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.kda.across import kda_carried, kda_state_gradient, kda_summary
from flopwright.kernels.kda.op import kda, kda_backward

if TYPE_CHECKING:
    from flopwright.executor.parallel.context import GroupContextParallel


def delta_rule_over_runs(
    cp: GroupContextParallel, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """Returns what KDA makes of this rank's runs [B * runs, L, H, V] behind all before them."""
    out: Tensor = _DeltaRule.apply(cp, scale, q, k, v, g, beta)  # type: ignore[no-untyped-call]
    return out


def inputs_before_runs(
    cp: GroupContextParallel, tensors: Sequence[Tensor], count: int
) -> tuple[Tensor, ...]:
    """Returns of each [B * runs, L, C] the `count` positions before its runs, zeros at the start.

    They travel in one message.
    """
    ends = torch.cat([t[:, -count:] for t in tensors], -1)
    before: Tensor = _Before.apply(cp, count, ends)  # type: ignore[no-untyped-call]
    return torch.split(before, [t.shape[-1] for t in tensors], -1)


def _of_all_runs(cp: GroupContextParallel, x: Tensor, name: str) -> list[Tensor]:
    """Returns the ranks' x [B * runs, ...] by run in the sequence's order, each [B, ...]."""
    own = len(cp.runs)
    parts = cp.all_gather(x.reshape(-1), name).view(cp.size, -1, own, *x.shape[1:])
    found: dict[int, Tensor] = {}
    for rank in range(cp.size):
        for place, run in enumerate(cp.runs_of(rank)):
            found[run] = parts[rank, :, place]
    return [found[run] for run in range(cp.num_runs)]


def _side_by_side(runs: Tensor) -> Tensor:
    """Returns [runs, B, ...] as [B * runs, ...]."""
    return runs.transpose(0, 1).flatten(0, 1)


class _DeltaRule(torch.autograd.Function):
    """The delta rule from the state before each run; backward to the gradient behind it.

    What the run's results ask of the state before it is all that must be known of a run to go
    on backward, since its transitions are known: no gradient flows through the summaries.
    """

    @staticmethod
    def forward(
        ctx: Any, cp: GroupContextParallel, scale: float, q: Tensor, k: Tensor, v: Tensor,
        g: Tensor, beta: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.cp, ctx.scale = cp, scale
        own = kda_summary(k, v, g, beta)
        runs = _of_all_runs(cp, own, "state_context")
        before = _side_by_side(kda_carried(runs, list(cp.runs), False))
        through = own[..., v.shape[-1] :].contiguous()
        out, _ = kda(q, k, v, g, beta, scale, before)
        ctx.save_for_backward(q, k, v, g, beta, before, through)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, before, through = ctx.saved_tensors
        asked = kda_state_gradient(grad, q, k, g, beta, ctx.scale)
        runs = _of_all_runs(ctx.cp, torch.cat((asked, through), -1), "state_context_grad")
        behind = _side_by_side(kda_carried(runs, list(ctx.cp.runs), True))
        *found, _ = kda_backward(grad, behind, q, k, v, g, beta, ctx.scale, before)
        return (None, None, *found)


class _Before(torch.autograd.Function):
    """The last positions before each run, out of the ends of runs before it."""

    @staticmethod
    def forward(ctx: Any, cp: GroupContextParallel, count: int, ends: Tensor) -> Tensor:
        ctx.cp, ctx.count, ctx.length = cp, count, ends.shape[1]
        # Runs shorter than `count` come whole: then what stands before one is of several.
        row = torch.cat(_of_all_runs(cp, ends, "conv_context"), 1)
        row = F.pad(row, (0, 0, count, 0))
        starts = [run * ctx.length for run in cp.runs]
        return _side_by_side(torch.stack([row[:, s : s + count] for s in starts]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        cp, count, length = ctx.cp, ctx.count, ctx.length
        runs = _of_all_runs(cp, grad, "conv_context_grad")
        batch, _, channels = runs[0].shape
        row = grad.new_zeros(batch, count + len(runs) * length, channels)
        for run, part in enumerate(runs):
            row[:, run * length : run * length + count] += part
        starts = [count + run * length for run in cp.runs]
        ends = torch.stack([row[:, s : s + length] for s in starts])
        return None, None, _side_by_side(ends)
