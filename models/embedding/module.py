"""Token embedding, and learned positions where the model has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flopwright.models.parallel import TensorParallel


class Embedding(nn.Module):
    """Rows of a table by token: [B, S] int64 to [B, S, hidden].

    Each tensor-parallel rank holds `held` of the rows and gets its own tokens' states.
    """

    def __init__(
        self,
        rows: int,
        hidden: int,
        held: int,
        tensor: TensorParallel,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(held, hidden, dtype=dtype, device=device))
        self.rows, self.tensor = rows, tensor

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the tokens' rows."""
        found = self.tensor.embed(tokens, self.weight, self.rows)
        return self.tensor.scatter(found, "embed_tokens")
