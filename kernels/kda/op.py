"""Kimi Delta Attention as an op: saves its inputs, no state.

The backward pass makes the states again. A CPU runs the chunked reference. With
fla's kernel the backward pass is fla's own, behind a second forward pass of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flopwright.kernels import libraries
from flopwright.kernels.dispatch import kernel_for
from flopwright.kernels.kda import reference
from flopwright.kernels.linear.reference import wide_dtype


def _state(q: Tensor, v: Tensor) -> Tensor:
    shape = (q.shape[0], *q.shape[2:], v.shape[-1])
    return q.new_zeros(shape, dtype=wide_dtype(q.dtype))


@torch.library.custom_op("flopwright::kda", mutates_args=())
def kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (o [B, T, H, V], the last state [B, H, K, V] at least fp32).

    Args:
        q, k: [B, T, H, K], k of length 1; v: [B, T, H, V].
        g: [B, T, H, K], log-decays of at most 0, and beta: [B, T, H], at least fp32.
        state: before the first token, at least fp32; None for zeros.
    """
    chosen = kernel_for("kda", q)
    if chosen == "library":
        return libraries.kda(q, k, v, g, beta, state, scale)
    if chosen == "triton":
        import flopwright.kernels.kda.kernel as kernel

        return kernel.forward(q, k, v, g, beta, scale, state)
    begin = _state(q, v) if state is None else state
    return reference.chunked(q, k, v, g, beta, scale, begin)


@kda.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (q.shape[0], *q.shape[2:], v.shape[-1])
    return v.new_empty(v.shape), q.new_empty(shape, dtype=wide_dtype(q.dtype))


@torch.library.custom_op("flopwright::kda_backward", mutates_args=())
def kda_backward(
    grad: Tensor, grad_end: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    scale: float, state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k, v, g, beta and of the first state."""
    if kernel_for("kda", q) != "reference":
        import flopwright.kernels.kda.kernel as kernel

        return kernel.backward(grad, grad_end, q, k, v, g, beta, scale, state)
    begin = _state(q, v) if state is None else state
    return reference.chunked_backward(grad, grad_end, q, k, v, g, beta, scale, begin)


@kda_backward.register_fake
def _(
    grad: Tensor, grad_end: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    scale: float, state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    made = [x.new_empty(x.shape) for x in (q, k, v, g, beta, grad_end)]
    return made[0], made[1], made[2], made[3], made[4], made[5]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, state = (*inputs, None)[:7]
    ctx.save_for_backward(*tensors, state)


def _backward(ctx: Any, grad: Tensor, grad_end: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, state = ctx.saved_tensors
    q = tensors[0]
    if kernel_for("kda", q) == "library" and not libraries.traced(q):
        run = partial(libraries.kda, scale=ctx.scale)
        found = libraries.gradients(run, (*tensors, state), (grad, grad_end))
        return (*found[:5], None, found[5])
    *grads, begin = kda_backward(grad, grad_end, *tensors, ctx.scale, state)
    return (*grads, None, begin if state is not None else None)


kda.register_autograd(_backward, setup_context=_setup)
