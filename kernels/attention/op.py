"""Causal attention as an op: saves q, k, v, its output and the log-sum-exp of each row.

CPU: torch's flash kernel, values padded to the query width where they differ. A GPU: our
Triton kernels, or torch's: its flash kernel in bf16 and fp16, else its memory-efficient one,
whose backward pass runs the forward again because it keeps random states that this op does
not save; with torch's kernels sliding windows run the reference forward. float64 on a GPU runs
the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.attention import reference
from flopwright.kernels.attention.block import (
    FLASH_DTYPES,
    attention_block,
    attention_block_backward,
    heads_first,
    prepared,
)
from flopwright.kernels.attention.max_logit import max_logit
from flopwright.kernels.dispatch import kernel_for, runs_triton
from flopwright.kernels.linear.reference import wide_dtype


def _visible(q: Tensor, window: int) -> Tensor | None:
    """Returns what to add to the scores [S, S] for a window that hides something, else None."""
    seq = q.shape[1]
    if not 0 < window < seq:
        return None
    hidden = reference.hidden_keys(seq, seq, window, q.device)
    return torch.zeros(seq, seq, dtype=q.dtype, device=q.device).masked_fill_(
        hidden, float("-inf")
    )


@torch.library.custom_op("flopwright::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns (output [B, S, H, V], log-sum-exp [B, H, S]); see `reference.attention`."""
    if runs_triton("attention", q):
        import flopwright.kernels.attention.kernel as kernel

        return kernel.forward(q, k, v, scale, window)[:2]
    return _library(q, k, v, scale, window)


def _flash(q: Tensor, window: int) -> bool:
    """Returns whether torch's flash kernel for GPUs takes these queries."""
    return q.is_cuda and q.dtype in FLASH_DTYPES and not 0 < window < q.shape[1]


def _library(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    if not q.shape[0] * q.shape[1]:  # torch's kernels do not take an empty batch
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide_dtype(q.dtype))
        return q.new_empty(*q.shape[:3], v.shape[-1]), lse
    mask = _visible(q, window)
    if q.is_cuda and (kernel_for("attention", q) == "reference" or mask is not None):
        return reference.attention(q, k, v, scale, window)
    if _flash(q, window):
        found: tuple[Tensor, Tensor] = attention_block(q, k, v, scale, True)
        return found
    queries, keys, values = prepared(q, k, v)
    if q.is_cuda:
        out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            queries, keys, values, None, True, 0.0, True, scale=scale
        )
        lse = lse[..., : q.shape[1]]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, mask is None, attn_mask=mask, scale=scale
        )
    out = out[..., : v.shape[-1]].transpose(1, 2)
    return out.contiguous(), lse.contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _width = q.shape
    out = q.new_empty((batch, seq, heads, v.shape[-1]))
    return out, q.new_empty((batch, heads, seq), dtype=wide_dtype(q.dtype))


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    queries, keys, values = prepared(q, k, v)
    width, mask = queries.shape[-1], _visible(q, window)
    results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        heads_first(grad, width), queries, keys, values, heads_first(out, width),
        lse.contiguous(), 0.0, mask is None, attn_mask=mask, scale=scale,
    )  # fmt: skip

    def back(g: Tensor, like: Tensor) -> Tensor:
        g = g[..., : like.shape[-1]].transpose(1, 2)
        if g.shape[2] != like.shape[2]:
            g = g.reshape(*like.shape[:3], -1, like.shape[3]).sum(3)
        return g.contiguous()

    return back(results[0], q), back(results[1], k), back(results[2], v)


@torch.library.custom_op("flopwright::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k and v."""
    if not q.shape[0] * q.shape[1]:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    if runs_triton("attention", q):
        import flopwright.kernels.attention.backward as kernel

        return kernel.backward(grad, q, k, v, out, lse, scale, window)
    if kernel_for("attention", q) == "library" and _flash(q, window):
        found: tuple[Tensor, Tensor, Tensor] = attention_block_backward(
            grad, q, k, v, out, lse, scale, True
        )
        return found
    if q.is_cuda:  # float64, or a call that did not come through autograd
        return reference.attention_backward(grad, q, k, v, out, lse, scale, window)
    return _cpu_backward(grad, q, k, v, out, lse, scale, window)


@attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def recomputed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v by running torch's own attention forward and back."""
    with torch.enable_grad():
        leaves = tuple(t.detach().requires_grad_() for t in (q, k, v))
        query, key, value = leaves
        repeat = q.shape[2] // k.shape[2]
        key, value = key.repeat_interleave(repeat, 2), value.repeat_interleave(repeat, 2)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        mask = _visible(q, window)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        grads = torch.autograd.grad(out.transpose(1, 2), leaves, grad)
    return grads[0], grads[1], grads[2]


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k and v by whichever kernel made the results."""
    again = kernel_for("attention", q) == "library" and not _flash(q, window)
    if q.is_cuda and again:
        return recomputed_backward(grad, q, k, v, scale, window)
    found: tuple[Tensor, Tensor, Tensor] = attention_backward(
        grad, q, k, v, out, lse, scale, window
    )
    return found


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(
    ctx: Any, grad: Tensor, _grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, None, None]:
    q, k, v, out, lse = ctx.saved_tensors
    return (*gradients(grad, q, k, v, out, lse, ctx.scale, ctx.window), None, None)


attention.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("flopwright::attention_with_max", mutates_args=())
def attention_with_max(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (output, log-sum-exp, largest logit by head [H]): what QK-Clip looks at.

    The Triton kernel finds the maximum on its way; other kernels make a second pass
    (`max_logit`). It saves what `attention` saves.
    """
    if runs_triton("attention_with_max", q):
        import flopwright.kernels.attention.kernel as kernel

        return kernel.forward(q, k, v, scale, window)
    return (*_library(q, k, v, scale, window), max_logit(q, k, scale, window))


@attention_with_max.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    batch, seq, heads, _width = q.shape
    out, wide = q.new_empty((batch, seq, heads, v.shape[-1])), wide_dtype(q.dtype)
    return out, q.new_empty((batch, heads, seq), dtype=wide), q.new_empty((heads,), dtype=wide)


def _setup_with_max(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    _setup(ctx, inputs, output[:2])
    ctx.mark_non_differentiable(*output[1:])


def _backward_with_max(
    ctx: Any, grad: Tensor, _grad_lse: Tensor | None, _grad_max: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, None, None]:
    return _backward(ctx, grad, None)


attention_with_max.register_autograd(_backward_with_max, setup_context=_setup_with_max)
