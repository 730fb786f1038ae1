"""Token embedding, and learned positions where the model has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flopwright.kernels.embedding.op import embedding


class Embedding(nn.Module):
    """Rows of a table by token: [...] int64 to [..., hidden]."""

    def __init__(
        self, rows: int, hidden: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden, dtype=dtype, device=device))

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the tokens' rows."""
        rows: Tensor = embedding(tokens, self.weight)
        return rows
