"""Newton-Schulz iteration in plain torch: the oracle of `op.py` (Keller Jordan, "Muon", 2024).

    X <- X / |X|;  five times: A = X X^T;  X <- a X + (b A + c A A) X

The polynomial a x + b x^3 + c x^5 acts on singular values and draws them near 1.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from flopwright.kernels.newton_schulz.cost import ITERATIONS

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM: Final = 1e-7


def normalised(x: Tensor) -> Tensor:
    """Returns matrices [..., rows, columns] of Frobenius norm 1; zeros stay zeros."""
    if x.ndim == 2:
        norm: Tensor = x.norm()
    else:
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return torch.div(x, norm.clamp(min=SMALLEST_NORM))


def newton_schulz(matrices: Tensor) -> Tensor:
    """Returns each of the matrices [..., rows, columns] with singular values near 1.

    It is computed in the dtype of the matrices. A matrix of zeros stays one.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    if x.ndim == 2:
        x = normalised(x)
        for _ in range(ITERATIONS):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.mT if tall else x
    shape = x.shape
    x = normalised(x.reshape(-1, *shape[-2:]))
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.view(shape)
    return x.mT if tall else x
