"""Sparse attention in plain torch: an indexer's choice, attention over it, what is learnt.

B batch, S queries, which are the last S of T positions, H heads of width D, K chosen positions a
query, I heads of the indexer of width W. All heads share one key a position, whose first V
columns are its value: latent attention with the keys' matrix in the query (arXiv 2405.04434,
2.1.2), as DeepSeek-V3.2 runs it. Queries are taken in runs, so that no [S, T] stands for all
heads at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from flopwright.kernels.attention.reference import hidden_keys
from flopwright.kernels.linear.reference import wide_dtype

# Numbers of a run of queries that stand at once.
_MOST: Final = 1 << 22
NONE: Final = -1  # in place of a chosen position where fewer are visible


def runs(queries: int, numbers_each: int) -> Iterator[slice]:
    """Yields runs of queries that need no more than so many numbers together."""
    step = max(1, _MOST // max(1, numbers_each))
    for first in range(0, queries, step):
        yield slice(first, min(first + step, queries))


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Returns sum over heads of w relu(q . k) [B, S, T], at least fp32; the mask is not in it.

    Args:
        q: [B, S, I, W]; k: [B, T, W]; weights: [B, S, I], the scales of the scores in them.
    """
    wide = wide_dtype(q.dtype)
    dots = torch.einsum("bsiw,btw->bsit", q.to(wide), k.to(wide)).relu_()
    return torch.einsum("bsit,bsi->bst", dots, weights.to(wide))


def select_keys(q: Tensor, k: Tensor, weights: Tensor, top_k: int) -> Tensor:
    """Returns the positions with the largest scores [B, S, min(top_k, T)] int32, best first.

    Of equal scores the earlier position goes first, so that a choice does not depend on what
    is computed with it. Queries that see fewer positions have `NONE` behind them.
    """
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    count = min(top_k, keys)
    chosen = torch.empty(batch, queries, count, dtype=torch.int32, device=q.device)
    for run in runs(queries, batch * heads * keys):
        scores = index_scores(q[:, run], k, weights[:, run])
        hidden = hidden_keys(queries, keys, 0, q.device)[run]
        scores = scores.masked_fill(hidden, float("-inf"))
        best, places = scores.sort(dim=-1, descending=True, stable=True)
        places = places.masked_fill(best == float("-inf"), NONE)
        chosen[:, run] = places[..., :count].to(torch.int32)
    return chosen


def _gathered(keys: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (the chosen keys [B, R, K, D] at least fp32, where nothing is chosen [B, R, K])."""
    absent = indices == NONE
    places = indices.masked_fill(absent, 0).long().flatten(1)
    found = torch.take_along_dim(keys, places.unsqueeze(-1), 1)
    found = found.view(*indices.shape, keys.shape[-1])
    return found.to(wide_dtype(keys.dtype)), absent


def selected_attention(
    q: Tensor, keys: Tensor, indices: Tensor, v_width: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns (softmax(scale q . k over the chosen keys) v [B, S, H, V], log-sum-exp [B, H, S]).

    Args:
        q: [B, S, H, D]; keys: [B, T, D]; indices: [B, S, K] int32, `NONE` where there is none.
    """
    batch, queries, heads, width = q.shape
    wide = wide_dtype(q.dtype)
    out = q.new_empty(batch, queries, heads, v_width)
    lse = q.new_empty(batch, heads, queries, dtype=wide)
    for run in runs(queries, batch * indices.shape[-1] * (width + heads)):
        found, absent = _gathered(keys, indices[:, run])
        scores = torch.einsum("brhd,brkd->brhk", q[:, run].to(wide), found) * scale
        scores = scores.masked_fill(absent.unsqueeze(2), float("-inf"))
        total = scores.logsumexp(-1)
        p = (scores - total.unsqueeze(-1)).exp()
        out[:, run] = torch.einsum("brhk,brkv->brhv", p, found[..., :v_width]).to(q.dtype)
        lse[:, :, run] = total.transpose(1, 2)
    return out, lse


def selected_attention_backward(
    grad: Tensor, q: Tensor, keys: Tensor, indices: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of queries and keys; a key's has those of its value in it."""
    batch, queries, heads, width = q.shape
    wide, v_width = lse.dtype, out.shape[-1]
    grad_q, grad_keys = q.new_empty(q.shape), keys.new_zeros(keys.shape, dtype=wide)
    flat = grad_keys.view(-1, width)
    first = torch.arange(batch, device=q.device).view(-1, 1, 1) * keys.shape[1]
    for run in runs(queries, batch * indices.shape[-1] * (2 * width + 2 * heads)):
        found, absent = _gathered(keys, indices[:, run])
        part, wide_q, own = (t[:, run].to(wide) for t in (grad, q, out))
        scores = torch.einsum("brhd,brkd->brhk", wide_q, found) * scale
        p = (scores - lse[:, :, run].transpose(1, 2).unsqueeze(-1)).exp()
        p = p.masked_fill(absent.unsqueeze(2), 0.0)
        along = (part * own).sum(-1, keepdim=True)
        inner = torch.einsum("brhv,brkv->brhk", part, found[..., :v_width])
        of_scores = p * (inner - along) * scale
        grad_q[:, run] = torch.einsum("brhk,brkd->brhd", of_scores, found).to(q.dtype)
        of_keys = torch.einsum("brhk,brhd->brkd", of_scores, wide_q)
        of_keys[..., :v_width] += torch.einsum("brhk,brhv->brkv", p, part)
        places = (indices[:, run].masked_fill(absent, 0).long() + first).flatten()
        flat.index_add_(0, places, of_keys.reshape(-1, width))
    return grad_q, grad_keys.to(keys.dtype)


def _mean_probabilities(
    q: Tensor, keys: Tensor, lse: Tensor, scale: float, hidden: Tensor
) -> Tensor:
    """Returns the mean over heads of what queries attend to, [B, R, K]; it sums to 1.

    Args:
        q: [B, R, H, D]; keys: [B, R, K, D] one a position, or [B, T, H, D] one a head.
        lse: [B, H, R]; hidden: [B, R, K] or [R, T] where nothing is attended to.
    """
    form = "brhd,bthd->brht" if hidden.ndim == 2 else "brhd,brkd->brhk"
    dots = torch.einsum(form, q, keys) * scale
    p = (dots - lse.transpose(1, 2).unsqueeze(-1)).exp()
    return p.masked_fill(hidden.unsqueeze(-2), 0.0).mean(2)


def index_loss(
    index_q: Tensor, index_k: Tensor, weights: Tensor, q: Tensor, keys: Tensor, lse: Tensor,
    indices: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns (loss, its gradients of index_q, index_k and weights).

    The loss is the mean over queries of KL(p || softmax of the index scores) over the chosen
    positions, p the mean over heads of what attention gives them (DeepSeek-V3.2, equation 4).

    Args:
        index_q: [B, S, I, W]; index_k: [B, S, W]; weights: [B, S, I].
        q: [B, S, H, D]; keys: [B, S, D], or [B, S, H, D] where nothing is left out.
        lse: [B, H, S] of that attention; scale: its factor on q . k.
        indices: [B, S, K] int32; None: every position up to the query's own.
    """
    batch, queries, heads, width = index_q.shape
    wide = lse.dtype
    count = queries if indices is None else indices.shape[-1]
    loss = lse.new_zeros(())
    grad_q, grad_w = index_q.new_empty(index_q.shape), weights.new_empty(weights.shape)
    grad_k = index_k.new_zeros(index_k.shape, dtype=wide)
    first = torch.arange(batch, device=q.device).view(-1, 1, 1) * queries
    each = batch * count * (heads + q.shape[2] + (0 if indices is None else width + q.shape[3]))
    for run in runs(queries, each):
        if indices is None:
            hidden = hidden_keys(queries, queries, 0, q.device)[run]
            found_k, found = index_k.to(wide).unsqueeze(1), keys.to(wide)
            places = None
        else:
            found_k, hidden = _gathered(index_k, indices[:, run])
            found = _gathered(keys, indices[:, run])[0]
            places = (indices[:, run].masked_fill(hidden, 0).long() + first).flatten()
        p = _mean_probabilities(q[:, run].to(wide), found, lse[:, :, run], scale, hidden)
        own_q, own_w = index_q[:, run].to(wide), weights[:, run].to(wide)
        form = "briw,bxkw->brik" if indices is None else "briw,brkw->brik"
        dots = torch.einsum(form, own_q, found_k).relu_()
        scores = torch.einsum("brik,bri->brk", dots, own_w)
        log_share = scores.masked_fill(hidden, float("-inf")).log_softmax(-1)
        log_share = log_share.masked_fill(hidden, 0.0)
        loss += (torch.special.xlogy(p, p) - p * log_share).sum()
        pull = (log_share.exp() - p).masked_fill(hidden, 0.0) / (batch * queries)
        grad_w[:, run] = torch.einsum("brik,brk->bri", dots, pull).to(weights.dtype)
        of_dots = (dots > 0) * pull.unsqueeze(2) * own_w.unsqueeze(-1)
        back = "brik,bxkw->briw" if indices is None else "brik,brkw->briw"
        grad_q[:, run] = torch.einsum(back, of_dots, found_k).to(index_q.dtype)
        if places is None:
            grad_k += torch.einsum("brik,briw->bkw", of_dots, own_q)
        else:
            of_keys = torch.einsum("brik,briw->brkw", of_dots, own_q)
            grad_k.view(-1, width).index_add_(0, places, of_keys.reshape(-1, width))
    return loss / (batch * queries), grad_q, grad_k.to(index_k.dtype), grad_w


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x @ weight^T head by head: [B, S, H, in] and [H, out, in] give [B, S, H, out]."""
    rows = x.flatten(0, 1).transpose(0, 1)
    return (rows @ weight.transpose(1, 2)).transpose(0, 1).reshape(*x.shape[:3], -1)
