"""Attention within documents and weighted losses, against torch on each document and row."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from flopwright.kernels.attention.documents import document_attention, document_max_logit
from flopwright.kernels.cross_entropy.op import cross_entropy
from flopwright.kernels.cross_entropy.sharded import part_gradient
from flopwright.kernels.cross_entropy.weighted import weighted_cross_entropy

BOUNDS = (0, 1, 6, 17, 20)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_each_document_is_attended_by_itself(window: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 20, 4, 8, dtype=dtype, requires_grad=True)
    k = torch.randn(1, 20, 2, 8, dtype=dtype, requires_grad=True)
    v = torch.randn(1, 20, 2, 6, dtype=dtype, requires_grad=True)
    out, _ = document_attention(q, k, v, BOUNDS, 0.3, window)
    mask = torch.zeros(20, 20, dtype=torch.bool)
    for first, end in pairwise(BOUNDS):
        ones = torch.ones(end - first, end - first, dtype=torch.bool).tril()
        mask[first:end, first:end] = ones.triu(1 - window) if window else ones
    heads = (t.repeat_interleave(2, 2).transpose(1, 2) for t in (k, v))
    wanted = F.scaled_dot_product_attention(q.transpose(1, 2), *heads, attn_mask=mask, scale=0.3)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    assert torch.allclose(out, wanted.transpose(1, 2), rtol=0, atol=bound)
    grad = torch.randn_like(out)
    mine = torch.autograd.grad(out, (q, k, v), grad)
    theirs = torch.autograd.grad(wanted.transpose(1, 2), (q, k, v), grad)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=bound)
    largest = document_max_logit(q, k, BOUNDS, 0.3, window)
    scores = 0.3 * q.transpose(1, 2) @ k.repeat_interleave(2, 2).transpose(1, 2).transpose(-1, -2)
    hidden = scores.masked_fill(~mask, float("-inf"))
    assert torch.allclose(largest, hidden.amax((0, 2, 3)), rtol=1e-5)


@pytest.mark.slow
def test_document_attention_is_a_sound_operator() -> None:
    q = torch.randn(1, 20, 2, 4, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(
        document_attention, (q, q.detach(), q.detach(), list(BOUNDS), 0.5), {"window": 0}
    )


def test_weights_scale_each_rows_loss_and_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (9,))
    weights = torch.rand(9, dtype=torch.float64)
    weights[3] = 0
    mean, _ = weighted_cross_entropy(logits, targets, weights)
    wanted = (F.cross_entropy(logits, targets, reduction="none") * weights).mean()
    assert torch.allclose(mean, wanted, rtol=1e-14)
    (mine,) = torch.autograd.grad(mean, logits)
    (theirs,) = torch.autograd.grad(wanted, logits)
    assert torch.allclose(mine, theirs, rtol=0, atol=1e-15)
    assert not mine[3].any()
    lse = logits.detach().logsumexp(-1)
    each = weights.unsqueeze(-1)
    assert torch.allclose(part_gradient(each, logits.detach(), targets, lse, 0), mine, atol=1e-15)
    plain, _ = cross_entropy(logits, targets)
    ones, _ = weighted_cross_entropy(logits, targets, torch.ones(9, dtype=torch.float64))
    assert torch.equal(plain, ones)
    torch.library.opcheck(weighted_cross_entropy, (logits, targets, weights))
