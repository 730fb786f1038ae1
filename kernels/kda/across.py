"""What carries Kimi Delta Attention's state across ranks as ops; nothing here is differentiated.

Whoever exchanges the summaries (executor/parallel/context_states.py) has both directions. fla's
kernels have no such passes: beside them ours run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.dispatch import kernel_for
from flopwright.kernels.kda import across_reference
from flopwright.kernels.linear.reference import wide_dtype


@torch.library.custom_op("flopwright::kda_summary", mutates_args=())
def kda_summary(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Returns what a run makes of a state, [B, H, K, V + K]; see `across_reference.summary`."""
    if kernel_for("kda", k) != "reference":
        import flopwright.kernels.kda.across_kernel as kernel

        return kernel.summary(k, v, g, beta)
    return across_reference.summary(k, v, g, beta)


@kda_summary.register_fake
def _(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    shape = (k.shape[0], *k.shape[2:], v.shape[-1] + k.shape[-1])
    return k.new_empty(shape, dtype=wide_dtype(k.dtype))


@torch.library.custom_op("flopwright::kda_state_gradient", mutates_args=())
def kda_state_gradient(
    grad: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, scale: float
) -> Tensor:
    """Returns the gradient of the state before a run that its own results ask for [B, H, K, V]."""
    if kernel_for("kda", q) != "reference":
        import flopwright.kernels.kda.across_kernel as kernel

        return kernel.state_gradient(grad, q, k, g, beta, scale)
    return across_reference.state_gradient(grad, q, k, g, beta, scale)


@kda_state_gradient.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, scale: float) -> Tensor:
    shape = (k.shape[0], *k.shape[2:], grad.shape[-1])
    return k.new_empty(shape, dtype=wide_dtype(k.dtype))


@torch.library.custom_op("flopwright::kda_carried", mutates_args=())
def kda_carried(summaries: list[Tensor], own: list[int], back: bool) -> Tensor:
    """Returns the states before the runs `own`, or the gradients behind them, [own, B, H, K, V].

    Args:
        summaries: of all runs in order, each [B, H, K, V + K]; see `across_reference.carried`.
    """
    return across_reference.carried(summaries, own, back=back)


@kda_carried.register_fake
def _(summaries: list[Tensor], own: list[int], back: bool) -> Tensor:
    *shape, k_width, width = summaries[0].shape
    return summaries[0].new_empty((len(own), *shape, k_width, width - k_width))
