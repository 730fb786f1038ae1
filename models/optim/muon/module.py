"""Muon's arithmetic (arXiv 2502.16982): momentum, Newton-Schulz, and the scale of an update.

    momentum <- lerp(momentum, gradient, 1 - mu);  u = lerp(gradient, momentum, mu)  (Nesterov)
    weight <- weight * (1 - lr * decay) - lr * 0.2 * sqrt(max(rows, columns)) * NS(u)

as torch.optim.Muon(adjust_lr_fn="match_rms_adamw") does. That one iterates in bf16 whatever
the weights are; here the format is the caller's (`compute_dtype` in cost.py). A stack of
matrices [..., rows, columns] is iterated on together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from flopwright.kernels.newton_schulz.op import newton_schulz as iterate

RMS: Final = 0.2
# Matrices iterated on together: more would only cost memory.
_STACK_NUMBERS: Final = 2**27


def update_scale(rows: int, columns: int) -> float:
    """Returns 0.2 * sqrt(max(rows, columns)): an update's root mean square is then AdamW's."""
    return RMS * math.sqrt(max(rows, columns))


def blend_(momentum: Tensor, gradient: Tensor, mu: float) -> Tensor:
    """Moves the momentum towards the gradient; returns Nesterov's update, element by element."""
    momentum.lerp_(gradient, 1 - mu)
    return gradient.lerp(momentum, mu)


@torch.no_grad()
def newton_schulz(matrices: Tensor) -> Tensor:
    """Returns each of the matrices [..., rows, columns] with singular values near 1.

    It is computed in the dtype of the matrices. A matrix of zeros stays one.
    """
    found: Tensor = iterate(matrices)
    return found


def orthogonalise(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Returns Newton-Schulz of each matrix [rows, columns]; equal shapes go together."""
    out: list[Tensor | None] = [None] * len(matrices)
    by_shape: dict[torch.Size, list[int]] = {}
    for i, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(i)
    for shape, indices in by_shape.items():
        together = max(1, _STACK_NUMBERS // max(1, shape.numel()))
        for begin in range(0, len(indices), together):
            some = indices[begin : begin + together]
            for i, result in zip(some, _stacked([matrices[i] for i in some]), strict=True):
                out[i] = result
    return [result for result in out if result is not None]


def _stacked(matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    if len(matrices) == 1:
        return [newton_schulz(matrices[0])]
    return newton_schulz(torch.stack(list(matrices))).unbind(0)
