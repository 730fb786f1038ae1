"""Checks of Kimi Delta Attention against the recurrence, token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.checks.compare import Check
from flopwright.kernels.checks.experts import draw
from flopwright.kernels.kda import reference
from flopwright.kernels.kda.op import kda


def _run(
    function: Callable[..., tuple[Tensor, Tensor]], a: tuple[Tensor, ...], k_width: int
) -> tuple[Tensor, Tensor]:
    return function(*a[:5], k_width**-0.5, a[5])


def kda_check(
    shape: tuple[int, int, int], widths: tuple[int, int], dtype: torch.dtype,
    device: torch.device, forgetting: float = 1.0, seed: int = 0,
) -> Check:  # fmt: skip
    """Returns (batch, tokens, heads) with a first state, (key, value) wide.

    Args:
        forgetting: scale of the log-decays; at 40 a channel forgets e^-600 in 16 tokens.
    """
    batch, tokens, heads = shape
    k_width, v_width = widths

    def normal(i: int, *more: int, of: torch.dtype = dtype) -> Tensor:
        return draw(seed + i, device, of, batch, tokens, heads, *more)

    q, k = (F.normalize(normal(i, k_width), dim=-1).to(dtype).double() for i in (0, 1))
    decay = (-F.softplus(normal(3, k_width)) * forgetting).float().double()
    rate = torch.sigmoid(normal(4)).float().double()
    state = draw(seed + 5, device, torch.float32, batch, heads, k_width, v_width)

    def op(*a: Tensor) -> tuple[Tensor, Tensor]:
        o, end = kda(*a[:5], k_width**-0.5, a[5])
        return o, end

    return Check(
        name=f"kda {shape} {widths} forgetting {forgetting:g}",
        op=op,
        exact=lambda *a: _run(reference.recurrent, a, k_width),
        rival=lambda *a: _run(reference.chunked, a, k_width),
        tensors=(q, k, normal(2, v_width), decay, rate, state),
        wide=frozenset({3, 4, 5}),
        outputs=2,
        by_row=device.type == "cuda",
    )
