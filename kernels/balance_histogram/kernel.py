"""The histogram of quantile balancing as a Triton kernel: integer atomics, one read of scores."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwright.kernels.launch import ceil_div, launch, unit_columns

_TOKENS: Final = 32
_EXPERTS: Final = 64


@triton.jit
def _histogram(
    scores_ptr, alpha_ptr, counts_ptr, tokens, experts, stride, low, per_unit, bins,
    BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    expert = tl.program_id(1) * BE + tl.arange(0, BE)
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    place = token.to(tl.int64)[:, None] * stride + expert[None, :]
    scores = tl.load(scores_ptr + place, mask=inside, other=0.0).to(tl.float32)
    alpha = tl.load(alpha_ptr + token, mask=token < tokens, other=0.0).to(tl.float32)
    place_in = tl.floor((alpha[:, None] - scores - low) * per_unit)
    last = (bins - 1).to(tl.float32)
    place_in = tl.where(place_in == place_in, place_in, last)  # NaN: no place in an array
    place_in = tl.minimum(tl.maximum(place_in, 0.0), last).to(tl.int32)
    to = counts_ptr + expert.to(tl.int64)[None, :] * bins + place_in
    tl.atomic_add(to, tl.full((BT, BE), 1, tl.int32), mask=inside, sem="relaxed")


def histogram(scores: Tensor, alpha: Tensor, low: float, high: float, bins: int) -> Tensor:
    """Returns counts [E, bins] int32; see the reference."""
    scores = unit_columns(scores)
    tokens, experts = scores.shape
    counts = torch.zeros(experts, bins, dtype=torch.int32, device=scores.device)
    launch(
        _histogram, (ceil_div(tokens, _TOKENS), ceil_div(experts, _EXPERTS)), scores,
        alpha.contiguous(), counts, tokens, experts, scores.stride(0), low, bins / (high - low),
        bins, BT=_TOKENS, BE=_EXPERTS,
    )  # fmt: skip
    return counts
