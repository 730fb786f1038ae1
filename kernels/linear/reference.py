"""Linear layer in plain torch: the oracle of `op.py`."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which sums over a row are kept: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """Returns x @ weight^T (+ bias): [..., in] and [out, in] give [..., out].

    Args:
        wide: compute and return at least fp32 (a router's logits).
    """
    if wide:
        dtype = wide_dtype(x.dtype)
        x, weight = x.to(dtype), weight.to(dtype)
    y = (x.reshape(-1, x.shape[-1]) @ weight.t()).reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.to(y.dtype)
