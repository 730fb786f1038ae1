"""Attention residuals in plain torch (arXiv 2607.24653, equations 8 to 10).

A site mixes sources v_1 .. v_n of every token: out = sum_i a_i v_i, with
a = softmax_i(q . rms_norm(v_i)), rms_norm with a weight, q a learned vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype


def _mixed(
    sources: Sequence[Tensor], wq: Tensor, eps: float
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Returns (sources at least fp32, one over their rms [n, ...], weights [n, ...])."""
    wide = [s.to(wq.dtype) for s in sources]
    rstd = torch.stack([torch.rsqrt(s.square().mean(-1) + eps) for s in wide])
    logits = torch.stack([(s * wq).sum(-1) for s in wide]) * rstd
    return wide, rstd, logits.softmax(0)


def _weighted(query: Tensor, weight: Tensor) -> Tensor:
    dtype = wide_dtype(query.dtype)
    return query.to(dtype).flatten() * weight.to(dtype)


def attn_res(sources: Sequence[Tensor], query: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the mixture [..., H].

    Args:
        sources: each [..., H]; query: [1, H]; weight: [H], of the norm.
    """
    wide, _, shares = _mixed(sources, _weighted(query, weight), eps)
    out = shares[0].unsqueeze(-1) * wide[0]
    for share, source in zip(shares[1:], wide[1:], strict=True):
        out.addcmul_(share.unsqueeze(-1), source)
    return out.to(sources[0].dtype)


def attn_res_backward(
    grad: Tensor, sources: Sequence[Tensor], query: Tensor, weight: Tensor, eps: float
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Returns the gradients of the sources, query and weight."""
    wq = _weighted(query, weight)
    wide, rstd, shares = _mixed(sources, wq, eps)
    d = grad.to(wq.dtype)
    d_shares = torch.stack([(d * s).sum(-1) for s in wide])
    d_logits = shares * (d_shares - (shares * d_shares).sum(0))
    found, d_wq = [], torch.zeros_like(wq)
    for i, source in enumerate(wide):
        pull, unit = (d_logits[i] * rstd[i]).unsqueeze(-1), source * rstd[i].unsqueeze(-1)
        d_wq += (d_logits[i].unsqueeze(-1) * unit).flatten(0, -2).sum(0)
        along = (unit * wq).mean(-1, keepdim=True)
        found.append(shares[i].unsqueeze(-1) * d + pull * (wq - unit * along))
    return (
        [f.to(s.dtype) for f, s in zip(found, sources, strict=True)],
        (d_wq * weight.to(wq.dtype)).view(query.shape).to(query.dtype),
        (d_wq * query.to(wq.dtype).flatten()).to(weight.dtype),
    )
