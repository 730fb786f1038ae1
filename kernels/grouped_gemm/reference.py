"""One matrix product an expert in plain torch: the oracle of `op.py`."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_gemm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Returns y [N, out], where the rows of expert e are x's times weight[e]^T.

    Args:
        x: [N, in], rows grouped by expert in ascending order.
        weight: [E, out, in].
        counts: [E] int64, rows of each expert; zero is allowed.
    """
    parts = torch.split(x, counts.tolist())
    return torch.cat([rows @ weight[e].t() for e, rows in enumerate(parts)])
