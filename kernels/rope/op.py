"""Rotary position embedding as ops: they save their angle tables only.

A rotation's gradient is the rotation back, so no activation is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.dispatch import runs_triton
from flopwright.kernels.rope import reference


def _turn_(out: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Rotates `out` [batch, seq, heads, width] in place; complex products where they fit."""
    if interleaved and out.dtype == cos.dtype and not out.is_meta:
        pairs = torch.view_as_complex(out.view(*out.shape[:-1], -1, 2))
        pairs.mul_(torch.complex(cos, sin).unsqueeze(1))
    else:
        out.copy_(reference.rotate(out, cos, sin, interleaved))


@torch.library.custom_op("flopwright::rope", mutates_args=())
def rope(x: Tensor, cos: Tensor, sin: Tensor, start: int, interleaved: bool) -> Tensor:
    """Returns x with its last dimension rotated from column `start` on; see `reference.rope`."""
    if runs_triton("rope", x):
        import flopwright.kernels.rope.kernel as kernel

        return kernel.turn(x, cos, sin, start, interleaved)
    out = x.clone(memory_format=torch.contiguous_format)
    if start % 2 == 0:
        _turn_(out[..., start:], cos, sin, interleaved)
    else:
        out[..., start:] = reference.rotate(x[..., start:], cos, sin, interleaved)
    return out


@rope.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, start: int, interleaved: bool) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.start, ctx.interleaved = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    cos, sin = ctx.saved_tensors
    return rope(grad, cos, -sin, ctx.start, ctx.interleaved), None, None, None, None


rope.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("flopwright::mla_key_value", mutates_args=())
def mla_key_value(
    kv: Tensor, key: Tensor, cos: Tensor, sin: Tensor, nope: int
) -> tuple[Tensor, Tensor]:
    """Returns MLA's keys and values from latent and shared key; see the reference."""
    if runs_triton("rope", kv):
        import flopwright.kernels.rope.kernel as kernel

        return kernel.mla_key_value(kv, key, cos, sin, nope)
    batch, seq, heads, _ = kv.shape
    rotary = key.shape[-1]
    keys = kv.new_empty(batch, seq, heads, nope + rotary)
    keys[..., :nope] = kv[..., :nope]
    keys[..., nope:] = reference.rotate(key.unsqueeze(2), cos, sin, True)
    return keys, kv[..., nope:].clone(memory_format=torch.contiguous_format)


@mla_key_value.register_fake
def _(kv: Tensor, key: Tensor, cos: Tensor, sin: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    heads = kv.shape[:-1]
    keys = kv.new_empty((*heads, nope + key.shape[-1]))
    return keys, kv.new_empty((*heads, kv.shape[-1] - nope))


def _mla_gradients(
    grad_keys: Tensor, grad_values: Tensor, cos: Tensor, sin: Tensor, nope: int
) -> tuple[Tensor, Tensor]:
    grad_kv = torch.cat((grad_keys[..., :nope], grad_values), -1)
    shared = grad_keys[..., nope:].sum(2, keepdim=True)
    return grad_kv, reference.rotate(shared, cos, -sin, True).squeeze(2)


@torch.library.custom_op("flopwright::mla_key_value_backward", mutates_args=())
def mla_key_value_backward(
    grad_keys: Tensor, grad_values: Tensor, cos: Tensor, sin: Tensor, nope: int
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the latent and of the shared key."""
    if runs_triton("rope", grad_keys):
        import flopwright.kernels.rope.kernel as kernel

        return kernel.mla_key_value_backward(grad_keys, grad_values, cos, sin, nope)
    return _mla_gradients(grad_keys, grad_values, cos, sin, nope)


@mla_key_value_backward.register_fake
def _(
    grad_keys: Tensor, grad_values: Tensor, cos: Tensor, sin: Tensor, nope: int
) -> tuple[Tensor, Tensor]:
    batch, seq, heads, v_width = grad_values.shape
    grad_kv = grad_keys.new_empty(batch, seq, heads, nope + v_width)
    return grad_kv, grad_keys.new_empty(batch, seq, grad_keys.shape[-1] - nope)


def _setup_mla(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, ctx.nope = inputs
    ctx.save_for_backward(cos, sin)


def _backward_mla(
    ctx: Any, grad_keys: Tensor, grad_values: Tensor
) -> tuple[Tensor, Tensor, None, None, None]:
    cos, sin = ctx.saved_tensors
    back = mla_key_value_backward if runs_triton("rope", grad_keys) else _mla_gradients
    grads = back(grad_keys, grad_values, cos, sin, ctx.nope)
    return (*grads, None, None, None)


mla_key_value.register_autograd(_backward_mla, setup_context=_setup_mla)
