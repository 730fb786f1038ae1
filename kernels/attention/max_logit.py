"""The largest attention logit of each head: what QK-Clip looks at (arXiv 2507.20534, 2.1).

Recomputed from queries and keys in blocks of rows; a fused attention that returns the
maximum of each row makes this pass unnecessary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype

_BLOCK_ROWS = 256


@torch.library.custom_op("flopwright::max_logit", mutates_args=())
def max_logit(q: Tensor, k: Tensor, scale: float, window: int = 0, causal: bool = True) -> Tensor:
    """Returns [H], at least fp32: the maximum of scale * q_i . k_j over the pairs in sight.

    Args:
        q: [B, S, H, D]; k: [B, S, G, D], G dividing H.
        window: positions that a query sees, itself included; 0 for all before it.
        causal: False where every query sees every key.
    """
    heads, dtype = q.shape[2], wide_dtype(q.dtype)
    best = torch.full((heads,), float("-inf"), dtype=dtype, device=q.device)
    for start in range(0, q.shape[1] if q.shape[0] else 0, _BLOCK_ROWS):
        rows = slice(start, min(start + _BLOCK_ROWS, q.shape[1]))
        first = max(0, start - window + 1) if window else 0
        keys = k[:, first : rows.stop if causal else None].to(dtype).transpose(1, 2)
        queries = q[:, rows].to(dtype).transpose(1, 2)
        # Query heads of a group together, so that a shared key is not copied for each.
        batch, _, length, width = queries.shape
        grouped = queries.reshape(batch, k.shape[2], -1, length, width)
        scores = (grouped @ keys.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
        if causal:
            hidden = _hidden(rows, first, window, q.device)
            scores = scores.masked_fill(hidden, float("-inf"))
        best = torch.maximum(best, scores.amax((0, 2, 3)))
    return best * scale


@max_logit.register_fake
def _(q: Tensor, k: Tensor, scale: float, window: int = 0, causal: bool = True) -> Tensor:
    return q.new_empty((q.shape[2],), dtype=wide_dtype(q.dtype))


def _hidden(rows: slice, first: int, window: int, device: torch.device) -> Tensor:
    """Returns [rows, keys from `first` on] bool: True where a query does not see a key."""
    query = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    key = torch.arange(first, rows.stop, device=device)
    hidden = key > query
    return hidden | (key <= query - window) if window else hidden
