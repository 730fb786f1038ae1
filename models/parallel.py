"""What a stage needs of the ranks that share its matrices or its sequences, and the one-rank case.

A module holds its rank's part of each matrix (`flopwright.plan.sharding`) and says where
partial results meet; how they travel is the executor's business. Two choices of tensor
parallelism, as in `models/local.py`: with sequence parallelism a rank holds a run of each
sequence between the cut matrices (arXiv 2205.05198), without it all of it (arXiv 1909.08053).

B batch, S the tokens of a sequence that the tensor-parallel ranks hold together, S' those of
one rank between cut matrices: S / size with sequence parallelism, otherwise S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from flopwright.kernels.attention.op import attention
from flopwright.kernels.embedding.op import embedding
from flopwright.kernels.kda.op import kda
from flopwright.kernels.linear.op import linear
from flopwright.kernels.linear_cross_entropy.op import linear_cross_entropy
from flopwright.models.head.module import loss

Matrix = tuple[Tensor, Tensor | None]  # weight [out, in], bias [out]


class TensorParallel(Protocol):
    """The ranks that cut each matrix between them; everything is differentiable.

    `name` says in traces what travels.
    """

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def index(self) -> int:
        """This rank's place among them."""
        ...

    @property
    def sequence_parallel(self) -> bool:
        """Whether a rank holds S / size tokens between cut matrices."""
        ...

    def columns(self, x: Tensor, matrices: Sequence[Matrix], name: str) -> tuple[Tensor, ...]:
        """Returns x @ weight^T + bias [B, S, out] for matrices of which ranks hold rows.

        x [B, S', in] is kept for the backward pass as it is, not gathered.
        """
        ...

    def gather(self, x: Tensor, name: str) -> Tensor:
        """Returns all tokens [B, S, in] of x [B, S', in], for cut matrices to read."""
        ...

    def scatter(self, partial: Tensor, name: str) -> Tensor:
        """Returns the sum over ranks of [B, S, out], of it this rank's tokens [B, S', out]."""
        ...

    def own_tokens(self, x: Tensor) -> Tensor:
        """Returns of x [B, S, ...] the part [B, S', ...] that this rank holds between matrices."""
        ...

    def mean_over_tokens(self, mean: Tensor, name: str) -> Tensor:
        """Returns the mean over the ranks that hold other tokens between cut matrices.

        Args:
            mean: of this rank's tokens. No gradient flows through it.
        """
        ...

    def embed(self, tokens: Tensor, table: Tensor, rows: int) -> Tensor:
        """Returns the rows of a table by token, zeros where another rank holds them.

        Args:
            tokens: [B, S] int64; table: this rank's part of `rows` rows.
        """
        ...

    def loss(
        self, logits: Tensor, targets: Tensor, vocab: int, weights: Tensor | None = None
    ) -> Tensor:
        """Returns the mean negative log-likelihood in nats a token, the same on every rank.

        Args:
            logits: [..., this rank's part of the vocabulary of `vocab`]; targets: [...] int64.
            weights: [...], by which tokens count; their mean over a step is 1. None: all alike.
        """
        ...

    def linear_loss(self, x: Tensor, weight: Tensor, targets: Tensor, vocab: int) -> Tensor:
        """Returns the same of hidden states, head and loss in one: no logits stand whole.

        Args:
            x: [B, S', in], kept as it is; weight: this rank's rows; targets: [B, S] int64.
        """
        ...


class ContextParallel(Protocol):
    """The ranks that cut each sequence between them."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def index(self) -> int:
        """This rank's place among them."""
        ...

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Returns the positions [tokens] int64, in the whole sequence, of a rank's tokens."""
        ...

    def mean_over_tokens(self, mean: Tensor, name: str) -> Tensor:
        """Returns the mean over all ranks; see `TensorParallel.mean_over_tokens`."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Returns causal attention over the whole sequence, of this rank's tokens.

        Args:
            q: [B, S, heads, width]; k: [B, S, key heads, width]; v: [B, S, key heads, out].
            window: positions that a query sees, itself included; 0: all before it.
        """
        ...

    def by_runs(self, x: Tensor) -> Tensor:
        """Returns x [B, S, ...] as [B * runs, S / runs, ...]: neighbouring tokens each."""
        ...

    def before_runs(self, tensors: Sequence[Tensor], count: int) -> tuple[Tensor | None, ...]:
        """Returns of each [B * runs, L, C] the `count` positions before its runs; None: zeros."""
        ...

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float
    ) -> Tensor:
        """Returns what KDA makes of a rank's runs behind all before them (kernels/kda).

        Args:
            q, k, v, g: [B * runs, L, heads, width]; beta: [B * runs, L, heads].
        """
        ...


class WholeMatrices:
    """Tensor parallelism of one rank: nothing is cut and nothing travels."""

    size, index, sequence_parallel = 1, 0, False

    def columns(self, x: Tensor, matrices: Sequence[Matrix], name: str) -> tuple[Tensor, ...]:
        """Returns the products."""
        return tuple(linear(x, weight, bias) for weight, bias in matrices)

    def gather(self, x: Tensor, name: str) -> Tensor:
        """Returns x."""
        return x

    def scatter(self, partial: Tensor, name: str) -> Tensor:
        """Returns the sum, which is the only summand."""
        return partial

    def own_tokens(self, x: Tensor) -> Tensor:
        """Returns x."""
        return x

    def mean_over_tokens(self, mean: Tensor, name: str) -> Tensor:
        """Returns the mean."""
        return mean

    def embed(self, tokens: Tensor, table: Tensor, rows: int) -> Tensor:
        """Returns the rows."""
        found: Tensor = embedding(tokens, table)
        return found

    def loss(
        self, logits: Tensor, targets: Tensor, vocab: int, weights: Tensor | None = None
    ) -> Tensor:
        """Returns the mean loss."""
        return loss(logits, targets, weights)

    def linear_loss(self, x: Tensor, weight: Tensor, targets: Tensor, vocab: int) -> Tensor:
        """Returns the mean loss."""
        rows = x.reshape(-1, x.shape[-1])
        mean: Tensor = linear_cross_entropy(rows, weight, targets.reshape(-1))[0]
        return mean


class WholeSequences:
    """Context parallelism of one rank."""

    size, index = 1, 0

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Returns 0 .. tokens - 1."""
        return torch.arange(tokens, device=device)

    def mean_over_tokens(self, mean: Tensor, name: str) -> Tensor:
        """Returns the mean."""
        return mean

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Returns the attended values."""
        out: Tensor = attention(q, k, v, scale, window)[0]
        return out

    def by_runs(self, x: Tensor) -> Tensor:
        """Returns x: a sequence is one run."""
        return x

    def before_runs(self, tensors: Sequence[Tensor], count: int) -> tuple[Tensor | None, ...]:
        """Returns None for each: nothing stands before a sequence."""
        return (None,) * len(tensors)

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float
    ) -> Tensor:
        """Returns the results of whole sequences."""
        out: Tensor = kda(q, k, v, g, beta, scale)[0]
        return out
