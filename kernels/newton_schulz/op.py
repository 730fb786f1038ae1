"""Newton-Schulz as an op, outside of autograd: an optimizer's."""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.dispatch import runs_triton
from flopwright.kernels.newton_schulz import reference


@torch.library.custom_op("flopwright::newton_schulz", mutates_args=())
def newton_schulz(matrices: Tensor) -> Tensor:
    """Returns each matrix [..., rows, columns] with singular values near 1; see the reference."""
    if runs_triton("newton_schulz", matrices):
        import flopwright.kernels.newton_schulz.kernel as kernel

        return kernel.newton_schulz(matrices).contiguous()
    return reference.newton_schulz(matrices).contiguous()


@newton_schulz.register_fake
def _(matrices: Tensor) -> Tensor:
    return matrices.new_empty(matrices.shape)
