"""Tensor parallelism over a process group: the collectives of `models/parallel.py`.

Which ones, and how many bytes, is what the cost tables state (`models/local.py`): with
sequence parallelism an all-gather before cut matrices and a reduce-scatter after them, and
backward the reverse, where inputs that are not kept whole are gathered once more for the
weights' gradients; without it an all-reduce after them forward and before them backward.
Each is an action "<collective>:<what>" of the time class "tp_comm".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from flopwright.executor.parallel.experts import Clock
from flopwright.executor.parallel.groups import Group
from flopwright.kernels.cross_entropy.sharded import part_gradient, part_terms
from flopwright.kernels.embedding.sharded import embedding_part
from flopwright.kernels.gradients import weight_gradient
from flopwright.kernels.linear.op import linear
from flopwright.kernels.linear_cross_entropy import sharded
from flopwright.models.parallel import Matrix
from flopwright.plan.sharding import Cut

_CLASS: Final = "tp_comm"
_ROWS: Final = Cut(dim=0, axis="tp")


@dataclass(frozen=True, slots=True)
class GroupTensorParallel:
    """Tensor parallelism of models/parallel.py over a group of several ranks."""

    group: Group
    clock: Clock
    sequence_parallel: bool

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    @property
    def index(self) -> int:
        """This rank's place among them."""
        return self.group.index

    def columns(self, x: Tensor, matrices: Sequence[Matrix], name: str) -> tuple[Tensor, ...]:
        """Returns the products of all tokens with this rank's rows."""
        weights, biases = zip(*matrices, strict=True)
        if self.sequence_parallel:
            found: tuple[Tensor, ...] = _Columns.apply(  # type: ignore[no-untyped-call]
                x, self, name, len(weights), *weights, *biases
            )
            return found
        whole = self.gather(x, name)
        return tuple(linear(whole, w, b) for w, b in matrices)

    def gather(self, x: Tensor, name: str) -> Tensor:
        """Returns all tokens; backward sums the gradients of the ranks."""
        kind: Any = _Gather if self.sequence_parallel else _Share
        out: Tensor = kind.apply(x, self, name)
        return out

    def scatter(self, partial: Tensor, name: str) -> Tensor:
        """Returns the sum over ranks, this rank's tokens of it."""
        kind: Any = _Scatter if self.sequence_parallel else _Sum
        out: Tensor = kind.apply(partial, self, name)
        return out

    def own_tokens(self, x: Tensor) -> Tensor:
        """Returns this rank's run of the tokens of x [B, S, ...]."""
        if not self.sequence_parallel:
            return x
        length = x.shape[1] // self.size
        return x.narrow(1, self.index * length, length)

    def mean_over_tokens(self, mean: Tensor, name: str) -> Tensor:
        """Returns the mean over the ranks, where each holds tokens of its own."""
        if not self.sequence_parallel:
            return mean
        return self.all_reduce_(mean.clone(), name).div_(self.size)

    def embed(self, tokens: Tensor, table: Tensor, rows: int) -> Tensor:
        """Returns the rows of the table that this rank holds, zeros for others."""
        out: Tensor = embedding_part(tokens, table, self._first(rows))
        return out

    def loss(
        self, logits: Tensor, targets: Tensor, vocab: int, weights: Tensor | None = None
    ) -> Tensor:
        """Returns the mean loss; of the logits nothing travels but two numbers a token."""
        flat = logits.reshape(-1, logits.shape[-1])
        each = None if weights is None else weights.reshape(-1)
        out: Tensor = _Loss.apply(  # type: ignore[no-untyped-call]
            flat, targets.reshape(-1), self._first(vocab), self, each
        )
        return out

    def linear_loss(self, x: Tensor, weight: Tensor, targets: Tensor, vocab: int) -> Tensor:
        """Returns the same, the logits made a part at a time; x is kept as it is."""
        if not self.sequence_parallel:
            x = self.gather(x, "lm_head")
        out: Tensor = _LinearLoss.apply(  # type: ignore[no-untyped-call]
            x, weight, targets.reshape(-1), self._first(vocab), self
        )
        return out

    def _first(self, rows: int) -> int:
        return _ROWS.ranges(rows, self.size, self.index)[0][0]

    def all_gather(self, x: Tensor, name: str) -> Tensor:
        """Returns [B, size * S, ...] of the ranks' x [B, S, ...]."""
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        with self.clock.action(f"all_gather:{name}", _CLASS, _bytes(parts)):
            dist.all_gather_single(parts, x.contiguous(), group=self.group.handle)
        batch, length = x.shape[:2]
        by_rank = parts.view(self.size, batch, length, *x.shape[2:])
        return by_rank.transpose(0, 1).reshape(batch, self.size * length, *x.shape[2:])

    def reduce_scatter(self, x: Tensor, name: str) -> Tensor:
        """Returns this rank's run of tokens of the sum of x [B, S, ...] over ranks."""
        batch, length = x.shape[0], x.shape[1] // self.size
        by_rank = x.view(batch, self.size, length, *x.shape[2:]).transpose(0, 1).contiguous()
        out = x.new_empty((batch, length, *x.shape[2:]))
        with self.clock.action(f"reduce_scatter:{name}", _CLASS, _bytes(x)):
            dist.reduce_scatter_single(out, by_rank.flatten(0, 1), group=self.group.handle)
        return out

    def all_reduce_(self, x: Tensor, name: str) -> Tensor:
        """Sums x over ranks in place and returns it."""
        with self.clock.action(f"all_reduce:{name}", _CLASS, _bytes(x)):
            return self.group.sum_(x)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


class _Gather(torch.autograd.Function):
    """Tokens of all ranks; backward reduce-scatters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: GroupTensorParallel, name: str) -> Tensor:
        ctx.link = (tp, name)
        return tp.all_gather(x, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        tp, name = ctx.link
        return tp.reduce_scatter(grad.contiguous(), f"{name}_grad"), None, None


class _Scatter(torch.autograd.Function):
    """This rank's tokens of the sum; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: GroupTensorParallel, name: str) -> Tensor:
        ctx.link = (tp, name)
        return tp.reduce_scatter(x.contiguous(), name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        tp, name = ctx.link
        return tp.all_gather(grad, f"{name}_grad"), None, None


class _Share(torch.autograd.Function):
    """What every rank has already; backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: GroupTensorParallel, name: str) -> Tensor:
        ctx.link = (tp, name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        tp, name = ctx.link
        own = grad.clone(memory_format=torch.contiguous_format)  # others may read the gradient
        return tp.all_reduce_(own, f"{name}_grad"), None, None


class _Sum(torch.autograd.Function):
    """The sum of the ranks' tensors, in the place of this rank's; backward nothing travels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: GroupTensorParallel, name: str) -> Tensor:
        return tp.all_reduce_(x.detach(), name)  # a product's result, which nobody else reads

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Columns(torch.autograd.Function):
    """Cut matrices that read gathered tokens; keeps this rank's tokens only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tp: GroupTensorParallel, name: str, count: int, *own: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = own[:count], own[count:]
        ctx.save_for_backward(x, *weights)
        ctx.link = (tp, name)
        ctx.biases = [None if b is None else b.dtype for b in biases]
        whole = tp.all_gather(x, name)
        return tuple(linear(whole, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        rows = [g.reshape(-1, g.shape[-1]) for g in grads]
        need_x, *wanted = ctx.needs_input_grad[0:1] + ctx.needs_input_grad[4:]
        grad_x = None
        if need_x:
            grad_x = _input_gradient(ctx, grads[0].shape[:-1], rows, weights)
        count, (tp, name) = len(weights), ctx.link
        again = _GatheredAgain(tp, name, uses=sum(wanted[:count]))
        made: list[Tensor | None] = [None] * len(wanted)
        place = 0  # among the inputs that are tensors
        for i, dtype in enumerate([*(w.dtype for w in weights), *ctx.biases]):
            place += dtype is not None
            if not wanted[i]:
                continue
            if i < count:
                made[i] = weight_gradient(ctx, place, again.product, rows[i], x)
            else:
                compute = partial(_bias_gradient, dtype=dtype)
                made[i] = weight_gradient(ctx, place, compute, rows[i - count])
        return grad_x, None, None, None, *made


@dataclass(slots=True)
class _GatheredAgain:
    """Products of gradients with all tokens, which are gathered once for `uses` of them."""

    tp: GroupTensorParallel
    name: str
    uses: int
    _whole: Tensor | None = None

    @torch.no_grad()
    def product(self, rows: Tensor, x: Tensor) -> Tensor:
        """Returns a weight's gradient."""
        whole = self.tp.all_gather(x, self.name) if self._whole is None else self._whole
        self.uses -= 1
        self._whole = whole if self.uses else None
        return rows.t() @ whole.reshape(-1, whole.shape[-1])


def _bias_gradient(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.sum(0).to(dtype)


def _input_gradient(
    ctx: Any, shape: Sequence[int], rows: Sequence[Tensor], weights: Sequence[Tensor]
) -> Tensor:
    tp, name = ctx.link
    total = rows[0] @ weights[0]
    for g, weight in zip(rows[1:], weights[1:], strict=True):
        total.addmm_(g, weight)
    out: Tensor = tp.reduce_scatter(total.view(*shape, -1), f"{name}_grad")
    return out


class _Loss(torch.autograd.Function):
    """Mean cross-entropy over a vocabulary of which every rank has a part of the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, tp: GroupTensorParallel,
        weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        terms = part_terms(logits, targets, first)
        lse, chosen = tp.all_gather(terms, "loss").chunk(2)
        lse = lse.view(tp.size, -1).logsumexp(0)
        ctx.save_for_backward(logits, targets, lse, weights)
        ctx.first = first
        nats = lse - chosen.view(tp.size, -1).sum(0)
        return nats.mean() if weights is None else (nats * weights.to(nats.dtype)).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, targets, lse, weights = ctx.saved_tensors
        if weights is not None:
            grad = grad * weights.to(lse.dtype).unsqueeze(-1)
        return part_gradient(grad, logits, targets, lse, ctx.first), None, None, None, None


class _LinearLoss(torch.autograd.Function):
    """Head and mean cross-entropy in one; keeps this rank's tokens, never logits."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, first: int, tp: GroupTensorParallel
    ) -> Tensor:
        terms = sharded.part_terms(_whole_rows(x, tp), weight, targets, first)
        gathered = tp.all_gather(terms, "loss").view(3, tp.size, -1)
        lse, chosen = sharded.joined(gathered)
        ctx.save_for_backward(x, weight, targets, lse)
        ctx.link = (first, tp)
        return ((lse[0] - chosen) + lse[1]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, targets, lse = ctx.saved_tensors
        first, tp = ctx.link
        rows = _whole_rows(x, tp)
        grad_x, grad_weight = sharded.part_gradients(grad, rows, weight, targets, lse, first)
        if tp.sequence_parallel:
            whole = grad_x.view(x.shape[0], -1, x.shape[-1])
            return tp.reduce_scatter(whole, "lm_head_grad"), grad_weight, None, None, None
        return grad_x.view(x.shape), grad_weight, None, None, None


def _whole_rows(x: Tensor, tp: GroupTensorParallel) -> Tensor:
    """Returns all tokens as rows."""
    whole = tp.all_gather(x, "lm_head") if tp.sequence_parallel else x
    return whole.reshape(-1, x.shape[-1])
