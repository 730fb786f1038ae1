"""Checks of the experts' kernels: grouped products, permutes and their way back."""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.checks.compare import Check
from flopwright.kernels.grouped_gemm.op import grouped_gemm
from flopwright.kernels.moe_permute.op import permute, sort_by_expert, unpermute


def draw(seed: int, device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Returns normal numbers on the grid of `dtype`, in float64."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    return numbers.to(dtype).double().to(device)


def _grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The oracle: each row's own expert's matrix, by padding experts to the fullest one."""
    owner = torch.repeat_interleave(torch.arange(len(counts), device=x.device), counts)
    start = counts.cumsum(0) - counts
    place = torch.arange(x.shape[0], device=x.device) - start[owner]
    fullest = max(1, int(counts.max()))
    padded = x.new_zeros(len(counts), fullest, x.shape[1]).index_put((owner, place), x)
    return torch.bmm(padded, weight.transpose(1, 2))[owner, place]


def grouped_gemm_check(
    counts: list[int],
    inner: int,
    out: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Check:
    """Returns a grouped product with these rows of each expert."""
    rows, experts = sum(counts), len(counts)
    return Check(
        name=f"grouped_gemm {counts if experts < 9 else f'{rows} rows'} x {inner} x {out}",
        op=grouped_gemm,
        exact=_grouped,
        tensors=(
            draw(seed, device, dtype, rows, inner),
            draw(seed + 1, device, dtype, experts, out, inner),
        ),
        rest=(torch.tensor(counts, device=device),),
    )


def _routes(
    tokens: int, top_k: int, experts: int, device: torch.device, seed: int
) -> tuple[Tensor, Tensor]:
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    skewed = scores + torch.linspace(0, 1, experts)  # the last ones get most of the tokens
    choices = skewed.topk(top_k, -1).indices.to(device)
    order, place, _ = sort_by_expert(choices, experts)
    return order, place


def permute_check(
    tokens: int, top_k: int, experts: int, width: int, dtype: torch.dtype, device: torch.device,
    seed: int = 0,
) -> Check:  # fmt: skip
    """Returns the gather to expert order."""
    order, place = _routes(tokens, top_k, experts, device, seed)
    return Check(
        name=f"permute {tokens} x {top_k} x {width}",
        op=permute,
        exact=lambda x, order, place, k: x[order // k],
        tensors=(draw(seed, device, dtype, tokens, width),),
        rest=(order, place, top_k),
    )


def _unpermute(rows: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
    tokens, top_k = weights.shape
    scaled = rows * weights.reshape(-1)[order].unsqueeze(-1)
    return rows.new_zeros(tokens, rows.shape[1]).index_add(0, order // top_k, scaled)


def unpermute_check(
    tokens: int, top_k: int, experts: int, width: int, dtype: torch.dtype, device: torch.device,
    seed: int = 0,
) -> Check:  # fmt: skip
    """Returns the weighted sum over a token's rows."""
    order, place = _routes(tokens, top_k, experts, device, seed)
    return Check(
        name=f"unpermute {tokens} x {top_k} x {width}",
        op=unpermute,
        exact=_unpermute,
        tensors=(
            draw(seed, device, dtype, tokens * top_k, width),
            draw(seed + 1, device, torch.float32, tokens, top_k),
        ),
        rest=(order, place),
        wide=frozenset({1}),
    )
