"""Run by test_in_the_interpreter.py in a process of its own."""

from __future__ import annotations

import torch

from flopwright.kernels.attention.op import attention, attention_with_max
from flopwright.kernels.kda.op import kda
from flopwright.kernels.linear_cross_entropy.op import linear_cross_entropy
from flopwright.kernels.lk_loss.op import linear_lk_loss


def test_no_tokens() -> None:
    q = torch.randn(2, 0, 4, 6, requires_grad=True)
    assert attention(q, q, q, 0.5)[0].shape == q.shape
    assert torch.autograd.grad(attention(q, q, q, 0.5)[0].sum(), q)[0].shape == q.shape
    assert attention_with_max(q, q, q, 0.5)[2].tolist() == [float("-inf")] * 4
    x, w = torch.randn(0, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    loss, lse = linear_cross_entropy(x, w, torch.zeros(0, dtype=torch.int64))
    assert loss.isnan()  # the mean of nothing, as torch's
    assert lse.shape == (2, 0)
    assert not torch.autograd.grad(loss, w)[0].any()
    assert linear_lk_loss(x, w, x, w)[0].isnan()
    assert not torch.autograd.grad(linear_lk_loss(x, w, x, w)[0], w)[0].any()
    assert kda(q, q, q, q, q[..., 0], 0.5)[0].shape == q.shape
