"""A projection: a weight, perhaps a bias, and the linear op."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flopwright.kernels.linear.op import linear
from flopwright.models.parallel import Matrix, TensorParallel


class Projection(nn.Module):
    """y = x @ weight^T (+ bias); weights are left unset until `init_weights_`."""

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

    @property
    def matrix(self) -> Matrix:
        """Weight and bias, for products that several projections share an input of."""
        return self.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., width_out]."""
        y: Tensor = linear(x, self.weight, self.bias)
        return y


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
        (y,) = self.tensor.columns(x, [self.matrix], self.name)
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
