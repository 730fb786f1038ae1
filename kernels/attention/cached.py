"""Attention of new positions over all that a cache holds; without gradients."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.attention.op import attention
from flopwright.kernels.attention.reference import hidden_keys


def cached_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0) -> Tensor:
    """Returns the attended values [B, S, H, V] of the last S of T consecutive positions.

    Args:
        q: [B, S, H, D]; k: [B, T, G, D]; v: [B, T, G, V], G dividing H, S <= T.
        window: positions that a query sees, itself included; 0 for all before it.
    """
    queries, keys = q.shape[1], k.shape[1]
    if queries == keys:
        out: Tensor = attention(q, k, v, scale, window)[0]
        return out
    visible = None
    if queries > 1 or 0 < window < keys:
        visible = ~hidden_keys(queries, keys, window, q.device)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    heads_first = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=scale, enable_gqa=True
    )
    return heads_first.transpose(1, 2)
