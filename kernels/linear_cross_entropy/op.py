"""Head and cross-entropy as an op: saves hidden states, weight, targets and two numbers a token.

The backward pass makes the logits again, a sixteenth of the vocabulary at a time; that part
of their gradient is all that ever stands in memory. Both gradients are made together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels import libraries
from flopwright.kernels.dispatch import kernel_for
from flopwright.kernels.launch import unit_columns
from flopwright.kernels.linear.reference import wide_dtype
from flopwright.kernels.linear_cross_entropy import reference


def statistics(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (log-sum-exp in two parts [2, N], the target's logit [N]); see the reference."""
    if kernel_for("linear_cross_entropy", x) != "reference":
        import flopwright.kernels.linear_cross_entropy.kernel as kernel

        return kernel.statistics(unit_columns(x), unit_columns(weight), targets)
    return reference.statistics(x, weight, targets)


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and weight; `lse` may be that of a larger vocabulary."""
    part = reference.gradient_part
    if kernel_for("linear_cross_entropy", x) != "reference":
        import flopwright.kernels.linear_cross_entropy.kernel as kernel

        part, x, weight = kernel.gradient_part, unit_columns(x), unit_columns(weight)
    grad_x = x.new_zeros(x.shape, dtype=wide_dtype(x.dtype))
    grad_weight = weight.new_empty(weight.shape)
    for first, end in reference.parts(weight.shape[0]):
        d = part(x, weight, targets, lse, grad, first, end)
        reference.product(d, weight[first:end], grad_x)
        torch.mm(d.t(), x, out=grad_weight[first:end])
        del d  # before the next part stands
    return grad_x.to(x.dtype), grad_weight


def _not_made(x: Tensor) -> Tensor:
    """Returns NaNs in the place of the log-sum-exps, which a library does not hand out."""
    return x.new_full((2, x.shape[0]), float("nan"), dtype=wide_dtype(x.dtype))


@torch.library.custom_op("flopwright::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (mean nats a token, log-sum-exp in two parts [2, N]); see the reference.

    Every token counts: there is no ignore_index. Of no tokens the mean is NaN, as torch's.

    Args:
        x: [N, hidden]; weight: [vocabulary, hidden]; targets: [N] int64.

    Raises:
        IndexError: a target is none of the vocabulary's, on a CPU as torch does; on a GPU,
            which nobody waits for, the mean is NaN then (a library's kernel does as it does).
    """
    vocab = weight.shape[0]
    if targets.device.type == "cpu" and targets.numel():
        least, most = targets.min(), targets.max()
        if least < 0 or most >= vocab:
            wrong = int(least if least < 0 else most)
            raise IndexError(f"target {wrong} is out of bounds: 0 to {vocab - 1}, none ignored")
    if kernel_for("linear_cross_entropy", x) == "library":
        mean = libraries.linear_cross_entropy(x.detach(), weight.detach(), targets)
        return mean.to(wide_dtype(x.dtype)), _not_made(x)
    lse, chosen = statistics(x, weight, targets)
    nats = (lse[0] - chosen) + lse[1]
    if targets.is_cuda:
        nats.masked_fill_((targets < 0) | (targets >= vocab), float("nan"))
    return nats.mean(), lse


@linear_cross_entropy.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    dtype = wide_dtype(x.dtype)
    return x.new_empty((), dtype=dtype), x.new_empty((2, x.shape[0]), dtype=dtype)


@torch.library.custom_op("flopwright::linear_cross_entropy_backward", mutates_args=())
def linear_cross_entropy_backward(
    grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and weight."""
    if kernel_for("linear_cross_entropy", x) == "library":  # its forward pass made none
        lse = statistics(x, weight, targets)[0]
    return gradients(grad, x, weight, targets, lse)


@linear_cross_entropy_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor, Tensor, None]:
    x, weight, targets, lse = ctx.saved_tensors
    chosen = kernel_for("linear_cross_entropy", x)
    if chosen == "library" and not libraries.traced(x):

        def mean(x: Tensor, weight: Tensor) -> Tensor:
            return libraries.linear_cross_entropy(x, weight, targets)

        grad_x, grad_weight = libraries.gradients(mean, (x, weight), (grad,))
        assert grad_x is not None
        assert grad_weight is not None
        return grad_x, grad_weight, None
    # In plain torch what stands for a moment stands in sight of whoever counts memory.
    plain = chosen == "reference" and not (x.is_meta or libraries.traced(x))
    run = gradients if plain else linear_cross_entropy_backward
    return (*run(grad, x, weight, targets, lse), None)


linear_cross_entropy.register_autograd(_backward, setup_context=_setup)
