"""A projection: a weight, perhaps a bias, and the linear op; beside it perhaps an adapter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flopwright.kernels.linear.op import linear
from flopwright.models.parallel import Matrix, TensorParallel


class Adapter(nn.Module):
    """A low-rank change of a matrix (arXiv 2106.09685): scale * up @ down, [out, r] and [r, in].

    `up` begins at 0, so that at first it changes nothing. See models/lora.
    """

    def __init__(self, like: Tensor, rank: int, scale: float) -> None:
        super().__init__()
        *stack, width_out, width_in = like.shape
        self.scale = scale
        self.down = nn.Parameter(like.new_empty(*stack, rank, width_in))
        self.up = nn.Parameter(like.new_zeros(*stack, width_out, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Returns what it adds to the product with x [..., in]."""
        added: Tensor = linear(linear(x, self.down) * self.scale, self.up)
        return added

    def change(self) -> Tensor:
        """Returns what it adds to the matrix, or to each of a stack."""
        return (self.up @ self.down) * self.scale


class Projection(nn.Module):
    """y = x @ weight^T (+ bias); weights are left unset until `init_weights_`.

    Attributes:
        adapter: added to it where the model is adapted.
    """

    adapter: Adapter | None

    def __init__(
        self,
        width_in: int,
        width_out: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in, dtype=dtype, device=device))
        self.bias = (
            nn.Parameter(torch.empty(width_out, dtype=dtype, device=device)) if bias else None
        )
        self.register_module("adapter", None)

    @property
    def matrix(self) -> Matrix:
        """Weight and bias, for products that several projections share an input of."""
        return self.weight, self.bias

    def whole(self) -> Tensor:
        """Returns the weight with its adapter in it, for who multiplies with it otherwise."""
        return self.weight if self.adapter is None else self.weight + self.adapter.change()

    def adapted(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns a product y with x, and what the adapter adds to it."""
        return y if self.adapter is None else y + self.adapter(x)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., width_out]."""
        return self.adapted(x, linear(x, self.weight, self.bias))


def columns(
    tensor: TensorParallel, x: Tensor, projections: Sequence[Projection], name: str
) -> tuple[Tensor, ...]:
    """Returns `TensorParallel.columns` of several projections of one input."""
    products = tensor.columns(x, [p.matrix for p in projections], name)
    return tuple(p.adapted(x, y) for p, y in zip(projections, products, strict=True))


class ColumnProjection(Projection):
    """A projection of which each tensor-parallel rank holds rows; it reads all tokens."""

    def __init__(
        self,
        width_in: int,
        width_out: int,
        tensor: TensorParallel,
        name: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(width_in, width_out, dtype=dtype, device=device)
        self.tensor, self.name = tensor, name

    def forward(self, x: Tensor) -> Tensor:
        """Returns this rank's columns of all tokens' results."""
        (y,) = columns(self.tensor, x, [self], self.name)
        return y


class RowProjection(Projection):
    """A projection of which each tensor-parallel rank holds columns; it sums over the ranks.

    `width_in` is this rank's part of the inputs. The bias is whole, and added to the sum.
    """

    def __init__(
        self,
        width_in: int,
        width_out: int,
        tensor: TensorParallel,
        name: str,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(width_in, width_out, bias=bias, dtype=dtype, device=device)
        self.tensor, self.name = tensor, name

    def forward(self, x: Tensor) -> Tensor:
        """Returns the sums, of this rank's tokens."""
        if self.tensor.size == 1:
            return super().forward(x)
        summed = self.tensor.scatter(linear(x, self.weight, None), self.name)
        return summed if self.bias is None else summed + self.bias


class Head(ColumnProjection):
    """The output head: logits, or the mean loss without them where it is given the targets."""

    def __init__(
        self,
        hidden: int,
        rows: int,
        vocab: int,
        tensor: TensorParallel,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(hidden, rows, tensor, "lm_head", dtype=dtype, device=device)
        self.vocab = vocab

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns this rank's columns of the logits, or the mean nats a token."""
        if targets is None:
            return super().forward(x)
        return self.tensor.linear_loss(x, self.weight, targets, self.vocab)
