"""Causal attention in plain torch: the oracle of `op.py`, and what CUDA float64 runs.

B batch, S sequence, H query heads, G key/value heads, D query/key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype


def _heads_first(x: Tensor, heads: int) -> Tensor:
    """Returns [B, S, G, D] as [B, H, S, D], each key/value head repeated for its queries."""
    return x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2)


def hidden_keys(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Returns [queries, keys] bool: True where a query must not see a key.

    Args:
        queries: the last so many of the `keys` positions.
        window: a query sees itself and window - 1 positions before it; 0: all before it.
    """
    ones = torch.ones(queries, keys, dtype=torch.bool, device=device)
    past = keys - queries
    hidden = ones.triu(past + 1)
    return hidden | ones.tril(past - window) if window else hidden


def _probabilities(q: Tensor, k: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    scores = (q @ k.transpose(-1, -2)) * scale
    hidden = hidden_keys(q.shape[-2], k.shape[-2], window, q.device)
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.unsqueeze(-1)), lse


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns (softmax(scale * q k^T, causal) v as [B, S, H, V], log-sum-exp [B, H, S]).

    Args:
        q: [B, S, H, D]; k: [B, S, G, D]; v: [B, S, G, V], G dividing H.
        window: positions that a query sees, itself included; 0 for all before it.
    """
    heads, dtype = q.shape[2], wide_dtype(q.dtype)
    queries = q.to(dtype).transpose(1, 2)
    p, lse = _probabilities(queries, _heads_first(k.to(dtype), heads), scale, window)
    out = p @ _heads_first(v.to(dtype), heads)
    return out.transpose(1, 2).to(q.dtype).contiguous(), lse


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k and v, scores computed again (arXiv 2205.14135, alg. 4)."""
    hidden = hidden_keys(q.shape[1], k.shape[1], window, q.device)
    return _gradients(grad, q, k, v, out, lse, scale, hidden)


def attention_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of one block; see `block.attention_block_backward`."""
    hidden = hidden_keys(q.shape[1], k.shape[1], 0, q.device) if causal else None
    return _gradients(grad, q, k, v, out, lse, scale, hidden)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    hidden: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    heads, groups, dtype = q.shape[2], k.shape[2], lse.dtype
    queries = q.to(dtype).transpose(1, 2)
    keys, values = _heads_first(k.to(dtype), heads), _heads_first(v.to(dtype), heads)
    grad_out = grad.to(dtype).transpose(1, 2)
    scores = (queries @ keys.transpose(-1, -2)) * scale - lse.unsqueeze(-1)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    p = torch.exp(scores)
    delta = (grad_out * out.to(dtype).transpose(1, 2)).sum(-1, keepdim=True)
    grad_scores = p * (grad_out @ values.transpose(-1, -2) - delta) * scale
    grads = (
        grad_scores @ keys,
        grad_scores.transpose(-1, -2) @ queries,
        p.transpose(-1, -2) @ grad_out,
    )

    def back(g: Tensor, like: Tensor) -> Tensor:
        g = g.transpose(1, 2)
        if g.shape[2] != groups and like.shape[2] == groups:
            g = g.reshape(*g.shape[:2], groups, heads // groups, -1).sum(3)
        return g.to(like.dtype).contiguous()

    return back(grads[0], q), back(grads[1], k), back(grads[2], v)


def attention_block(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Returns attention of queries to one block of keys; see `block.attention_block`."""
    if causal:
        return attention(q, k, v, scale)
    heads, dtype = q.shape[2], wide_dtype(q.dtype)
    scores = q.to(dtype).transpose(1, 2) @ _heads_first(k.to(dtype), heads).transpose(-1, -2)
    lse = torch.logsumexp(scores * scale, -1)
    p = torch.exp(scores * scale - lse.unsqueeze(-1))
    out = p @ _heads_first(v.to(dtype), heads)
    return out.transpose(1, 2).to(q.dtype).contiguous(), lse
