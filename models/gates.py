"""Gated activations between two matrices, their inputs kept as the saving policy says.

Under FP8 storage one op makes the result and what is kept of its inputs; where the inputs are
dropped, or nothing is narrow, the plain op runs.
"""

from __future__ import annotations

from torch import Tensor

from flopwright.kernels.swiglu.op import swiglu, swiglu_packed
from flopwright.kernels.swiglu.situ import gated_fp8, gated_fp8_packed, situ_glu
from flopwright.kernels.swiglu.situ_packed import situ_glu_packed
from flopwright.models.saving import keeps_narrow, narrow, narrow_already, region

Bounds = tuple[float, float] | None  # of SiTU-GLU; None is SwiGLU


def gated(groups: tuple[str, ...], gate: Tensor, up: Tensor, bounds: Bounds) -> Tensor:
    """Returns the activation of two tensors [..., width].

    Args:
        groups: the recompute groups of the activation.
    """
    y: Tensor
    if keeps_narrow(groups):
        y, *kept = gated_fp8(gate, up, list(bounds or ()))
        narrow_already(*kept)
    elif bounds is None:
        y = region(groups, swiglu, narrow(gate), narrow(up))
    else:
        y = region(groups, situ_glu, narrow(gate), narrow(up), *bounds)
    return y


def gated_packed(groups: tuple[str, ...], gate_up: Tensor, bounds: Bounds) -> Tensor:
    """Returns the same of both side by side, [..., 2 * width]."""
    y: Tensor
    if keeps_narrow(groups):
        y, *kept = gated_fp8_packed(gate_up, list(bounds or ()))
        narrow_already(*kept)
    elif bounds is None:
        y = region(groups, swiglu_packed, narrow(gate_up))
    else:
        y = region(groups, situ_glu_packed, narrow(gate_up), *bounds)
    return y
