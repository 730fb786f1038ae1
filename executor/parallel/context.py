"""Context parallelism over a process group: attention where each rank holds part of a sequence.

Three exchanges (`context_parallel` of a plan):

    ring        keys and values go round the group, the next ones on their way while those
                here are attended; backward they go round again, and their gradients with them
    all_gather  they are gathered whole, forward and again backward; gradients are
                reduce-scattered
    ulysses     heads are exchanged for tokens and back (arXiv 2309.14509)

Ring and all_gather cut a sequence in 2 * size runs, of which rank r holds number r and number
2 * size - 1 - r, so that causal attention is the same work on every rank; ulysses, where each
rank has all tokens of its heads, cuts it in size runs. Keys and values travel in one message,
after the up-projection under MLA too (`models/core_attention.py`). Linear attention keeps
these runs and sends its state (context_states.py). Each message is an action
"<collective>:<what>" of the time class "cp_comm".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from flopwright.executor.parallel.context_blocks import attention_over_blocks
from flopwright.executor.parallel.context_states import (
    delta_rule_over_runs,
    inputs_before_runs,
)
from flopwright.executor.parallel.experts import Clock
from flopwright.executor.parallel.groups import Group
from flopwright.kernels.attention.op import attention
from flopwright.plan.parallel import ContextName

_CLASS: Final = "cp_comm"


@dataclass(frozen=True, slots=True)
class GroupContextParallel:
    """Context parallelism of models/parallel.py over a group of several ranks."""

    group: Group
    clock: Clock
    kind: ContextName

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    @property
    def index(self) -> int:
        """This rank's place among them."""
        return self.group.index

    @property
    def runs(self) -> tuple[int, ...]:
        """The runs of a sequence that this rank holds, of `num_runs`."""
        return self.runs_of(self.index)

    def runs_of(self, index: int) -> tuple[int, ...]:
        """Returns the runs that a rank of the group holds."""
        if self.kind == "ulysses":
            return (index,)
        return (index, 2 * self.size - 1 - index)

    @property
    def num_runs(self) -> int:
        """Equal runs that a sequence is cut in."""
        return self.size * len(self.runs)

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Returns the positions [tokens] in the whole sequence of this rank's tokens."""
        length = tokens // len(self.runs)
        runs = [torch.arange(r * length, (r + 1) * length, device=device) for r in self.runs]
        return torch.cat(runs)

    def own_tokens(self, x: Tensor) -> Tensor:
        """Returns this rank's tokens [B, S / size, ...] of whole sequences x [B, S, ...]."""
        runs = x.chunk(self.num_runs, 1)
        return torch.cat([runs[r] for r in self.runs], 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Returns causal attention over the whole sequence of this rank's tokens."""
        if self.kind == "ulysses":
            return self._over_heads(q, k, v, scale, window)
        assert not window, "windows are refused with these exchanges (executor/launch)"
        return attention_over_blocks(q, k, v, scale, self)

    def by_runs(self, x: Tensor) -> Tensor:
        """Returns [B, S, ...] as [B * runs, S / runs, ...]."""
        return x.reshape(-1, x.shape[1] // len(self.runs), *x.shape[2:])

    def before_runs(self, tensors: Sequence[Tensor], count: int) -> tuple[Tensor | None, ...]:
        """Returns of each [B * runs, L, C] the `count` positions before its runs."""
        if not count:
            return (None,) * len(tensors)
        return inputs_before_runs(self, tensors, count)

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float
    ) -> Tensor:
        """Returns what KDA makes of this rank's runs, each [B * runs, L, H, V]."""
        return delta_rule_over_runs(self, q, k, v, g, beta, scale)

    def mean_over_tokens(self, mean: Tensor, name: str) -> Tensor:
        """Returns the mean over the ranks."""
        out = mean.clone()
        with self.clock.action(f"all_reduce:{name}", _CLASS, _bytes(out)):
            return self.group.sum_(out).div_(self.size)

    def _over_heads(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        q, k, v = _ExchangeHeads.apply(self, "heads", True, q, k, v)  # type: ignore[no-untyped-call]
        out, _ = attention(q, k, v, scale, window)
        (back,) = _ExchangeHeads.apply(self, "heads_out", False, out)  # type: ignore[no-untyped-call]
        found: Tensor = back
        return found

    def all_to_all(self, x: Tensor, name: str) -> Tensor:
        """Returns [size, ...]: from each rank what it had for this one in x [size, ...]."""
        out = torch.empty_like(x)
        leaving = _bytes(x) * (self.size - 1) // self.size
        with self.clock.action(f"all_to_all:{name}", _CLASS, leaving):
            dist.all_to_all_single(out, x, group=self.group.handle)
        return out

    def all_gather(self, x: Tensor, name: str) -> Tensor:
        """Returns [size, N] of the ranks' x [N]."""
        out = x.new_empty(self.size * x.shape[0])
        with self.clock.action(f"all_gather:{name}", _CLASS, _bytes(out)):
            dist.all_gather_single(out, x, group=self.group.handle)
        return out.view(self.size, -1)

    def reduce_scatter(self, x: Tensor, name: str) -> Tensor:
        """Returns this rank's row of the sum of x [size, N] over ranks."""
        out = torch.empty_like(x[0])
        with self.clock.action(f"reduce_scatter:{name}", _CLASS, _bytes(x)):
            dist.reduce_scatter_single(out, x.view(-1), group=self.group.handle)
        return out

    def pass_on(self, x: Tensor, tag: int) -> Passing:
        """Starts sending x to the next rank of the ring, and receiving from the one before."""
        arriving = torch.empty_like(x)
        after = self.group.ranks[(self.index + 1) % self.size]
        before = self.group.ranks[self.index - 1]
        handle = self.group.handle
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, after, handle, tag),
                dist.P2POp(dist.irecv, arriving, before, handle, tag),
            ]
        )
        return Passing(x, arriving, works)

    def arrive(self, passing: Passing, name: str) -> Tensor:
        """Waits for what `pass_on` started; returns what came."""
        with self.clock.action(f"ring:{name}", _CLASS, _bytes(passing.arriving)):
            for work in passing.works:
                work.wait()
        return passing.arriving


@dataclass(frozen=True, slots=True)
class Passing:
    """A message on its way round; `leaving` must stay as it is until it has left."""

    leaving: Tensor
    arriving: Tensor
    works: Sequence[Any]


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


class _ExchangeHeads(torch.autograd.Function):
    """[B, S / size, H, D] of each tensor to [B, S, H / size, D] or back, in one message."""

    @staticmethod
    def forward(
        ctx: Any, cp: GroupContextParallel, name: str, to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.travel = (cp, name, to_heads)
        return _exchange_heads(cp, name, to_heads, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cp, name, to_heads = ctx.travel
        return None, None, None, *_exchange_heads(cp, f"{name}_grad", not to_heads, grads)


def _exchange_heads(
    cp: GroupContextParallel, name: str, to_heads: bool, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Returns the tensors with their heads cut and their tokens whole, or the reverse."""
    cut, joined = (2, 1) if to_heads else (1, 2)
    pieces = [torch.stack(t.chunk(cp.size, cut)) for t in tensors]  # [size, B, S, H, D]
    arrived = cp.all_to_all(torch.cat([p.flatten(1) for p in pieces], 1), name)
    widths = [p[0].numel() for p in pieces]
    return tuple(
        torch.cat(part.reshape(p.shape).unbind(), joined)
        for part, p in zip(torch.split(arrived, widths, 1), pieces, strict=True)
    )
