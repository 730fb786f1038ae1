"""Fake quantisation to a microscaling format as an op; its gradient passes straight through.

Saturated numbers get their gradient too: with a scale that rounds down they are the largest
of a block, and a gradient of zero would hold them there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.dispatch import runs_triton
from flopwright.kernels.mx_quantize import reference


@torch.library.custom_op("flopwright::mx_fake_quantize", mutates_args=())
def mx_fake_quantize(x: Tensor, element: str) -> Tensor:
    """Returns x as MXFP4 ("e2m1") or MXFP8 ("e4m3", "e5m2") keeps it; see the reference."""
    if runs_triton("mx_quantize", x):
        import flopwright.kernels.mx_quantize.kernel as kernel

        return kernel.fake_quantize(x, element)
    return reference.fake_quantize(x, element)


@mx_fake_quantize.register_fake
def _(x: Tensor, element: str) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    """Saves nothing."""


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


mx_fake_quantize.register_autograd(_backward, setup_context=_setup)
