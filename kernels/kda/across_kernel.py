"""The two passes of `across_reference` over a run's tokens as Triton kernels.

As in `kernel.py` a program goes through the chunks of one head for a part of the columns of its
state, which stays in registers; neither pass writes anything but the state it ends with.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwright.kernels.kda.kernel import _chunk, _constants, _dot, _product
from flopwright.kernels.kda.tiles import tiles
from flopwright.kernels.launch import ceil_div, launch, target


@triton.jit
def _summary(
    k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr, tokens, heads, k_width, v_width, C: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, DOUBLINGS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Columns from v_width on begin with the identity and take no values."""
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    here = tl.arange(0, C)
    ck = tl.arange(0, K)
    cv = tl.program_id(1) * V + tl.arange(0, V)
    width = v_width + k_width
    state = tl.where((cv - v_width)[None, :] == ck[:, None], 1.0, 0.0)
    for n in range(tl.cdiv(tokens, C)):
        (_q, k, v, beta, total, last, _of_q, _of_k, inverse, _place, _at_k, _at_v, _there, _in_k,
         _in_v) = (
            _chunk(
                k_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, n, b, h, 1.0, tokens, heads, k_width,
                v_width, here, ck, cv, C, DOUBLINGS,
            )
        )  # fmt: skip
        right = beta[:, None] * (v - _product(tl.exp(total) * k, state, P))
        change = _product(inverse, right, "ieee")
        rest = tl.exp(last[None, :] - total) * k
        state = _dot(tl.trans(rest), change, state * tl.exp(last)[:, None], P)
    to = out_ptr + (b * heads + h) * k_width * width
    mask = (ck < k_width)[:, None] & (cv < width)[None, :]
    tl.store(to + ck[:, None] * width + cv[None, :], state, mask=mask)


@triton.jit
def _state_gradient(
    grad_ptr, q_ptr, k_ptr, g_ptr, beta_ptr, out_ptr, scale, tokens, heads, k_width, v_width,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DOUBLINGS: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """Chunks from the last; the gradient of the results stands where values do."""
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    here = tl.arange(0, C)
    ck = tl.arange(0, K)
    cv = tl.program_id(1) * V + tl.arange(0, V)
    ds = tl.zeros((K, V), dtype=tl.float32)
    chunks = tl.cdiv(tokens, C)
    for step in range(chunks):
        n = chunks - 1 - step
        (q, k, do, beta, total, last, of_q, _of_k, inverse, _place, _at_k, _at_v, _there, _in_k,
         _in_v) = (
            _chunk(
                q_ptr, k_ptr, grad_ptr, g_ptr, beta_ptr, n, b, h, scale, tokens, heads, k_width,
                v_width, here, ck, cv, C, DOUBLINGS,
            )
        )  # fmt: skip
        grown = tl.exp(total)
        rest = tl.exp(last[None, :] - total) * k
        d_change = _product(tl.trans(of_q), do, P)
        d_change = _dot(rest, ds, d_change, P)
        d_misses = beta[:, None] * _product(tl.trans(inverse), d_change, "ieee")
        ds = ds * tl.exp(last)[:, None]
        ds = _dot(tl.trans(grown * q), do, ds, P)
        ds -= _product(tl.trans(grown * k), d_misses, P)
    to = out_ptr + (b * heads + h) * k_width * v_width
    mask = (ck < k_width)[:, None] & (cv < v_width)[None, :]
    tl.store(to + ck[:, None] * v_width + cv[None, :], ds, mask=mask)


def summary(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Returns (A, M) side by side, [B, H, K, V + K] fp32; see `across_reference.summary`."""
    k, v, g, beta = (x.contiguous() for x in (k, v, g, beta))
    batch, tokens, heads, k_width = k.shape
    width = v.shape[-1] + k_width
    out = k.new_empty(batch, heads, k_width, width, dtype=torch.float32)
    t = tiles(target(k.device))
    constants = _constants(t, k, t.forward, width)
    launch(
        _summary, (batch * heads, ceil_div(width, int(constants["V"]))), k, v, g, beta, out,
        tokens, heads, k_width, v.shape[-1], **constants, num_warps=t.warps, num_stages=1,
    )  # fmt: skip
    return out


def state_gradient(
    grad: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, scale: float
) -> Tensor:
    """Returns E [B, H, K, V] fp32; see `across_reference.state_gradient`."""
    grad, q, k, g, beta = (x.contiguous() for x in (grad, q, k, g, beta))
    batch, tokens, heads, k_width = k.shape
    v_width = grad.shape[-1]
    out = k.new_empty(batch, heads, k_width, v_width, dtype=torch.float32)
    t = tiles(target(k.device))
    constants = _constants(t, q, t.forward, v_width)
    launch(
        _state_gradient, (batch * heads, ceil_div(v_width, int(constants["V"]))), grad, q, k, g,
        beta, out, scale, tokens, heads, k_width, v_width, **constants, num_warps=t.warps,
        num_stages=1,
    )  # fmt: skip
    return out
