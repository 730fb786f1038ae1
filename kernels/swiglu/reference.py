"""SwiGLU in plain torch (arXiv 2002.05202): the oracle of `op.py`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up."""
    return F.silu(gate) * up


def swiglu_packed(gate_up: Tensor) -> Tensor:
    """Returns silu(first half) * second half of the last dimension."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
