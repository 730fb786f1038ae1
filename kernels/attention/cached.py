"""Attention of new positions over all that a cache holds; without gradients."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.attention.op import attention
from flopwright.kernels.attention.reference import hidden_keys
from flopwright.kernels.attention.sinks import with_sinks


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """Returns the attended values [B, S, H, V] of the last S of T consecutive positions.

    Args:
        q: [B, S, H, D]; k: [B, T, G, D]; v: [B, T, G, V], G dividing H, S <= T.
        window: positions that a query sees, itself included; 0 for all before it.
        sinks: [H] one more logit a head, with no value behind it.
    """
    queries, keys = q.shape[1], k.shape[1]
    if queries == keys:
        out, lse = attention(q, k, v, scale, window)
        whole: Tensor = out if sinks is None else with_sinks(out, lse, sinks)[0]
        return whole
    visible = None
    if queries > 1 or 0 < window < keys:
        visible = ~hidden_keys(queries, keys, window, q.device)
    if sinks is not None:  # a key of zeros, whose logit the mask makes the sink
        return _with_sinks(q, k, v, scale, window, sinks)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    heads_first = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=scale, enable_gqa=True
    )
    return heads_first.transpose(1, 2)


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, sinks: Tensor
) -> Tensor:
    queries, keys = q.shape[1], k.shape[1]
    hidden = hidden_keys(queries, keys, window, q.device)
    added = q.new_zeros(1, q.shape[2], queries, keys + 1)
    added[..., :keys].masked_fill_(hidden, float("-inf"))
    added[..., keys] = sinks.to(q.dtype).view(1, -1, 1)
    q, k, v = (
        t.transpose(1, 2) for t in (q, F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1)))
    )
    attended = F.scaled_dot_product_attention(
        q, k, v, attn_mask=added, scale=scale, enable_gqa=True
    )
    return attended.transpose(1, 2)
