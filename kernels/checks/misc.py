"""Checks of Newton-Schulz, microscaling formats and the histogram of quantile balancing."""

from __future__ import annotations

import torch

from flopwright.kernels.balance_histogram import reference as balance
from flopwright.kernels.balance_histogram.op import balance_histogram
from flopwright.kernels.checks.compare import Check, Verdict, verify
from flopwright.kernels.checks.experts import draw
from flopwright.kernels.mx_quantize import reference as mx
from flopwright.kernels.mx_quantize.op import mx_fake_quantize
from flopwright.kernels.newton_schulz import reference as schulz
from flopwright.kernels.newton_schulz.op import newton_schulz


def newton_schulz_check(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Check:
    """Returns the iteration on a stack of matrices; compared in the dtype it runs in."""
    return Check(
        name=f"newton_schulz {shape}",
        op=newton_schulz,
        exact=schulz.newton_schulz,
        tensors=(draw(seed, device, dtype, *shape),),
        constant=frozenset({0}),
        by_row=True,
    )


def mx_verdicts(
    shape: tuple[int, ...], element: str, dtype: torch.dtype, device: torch.device,
    size: float = 1.0, seed: int = 0,
) -> list[Verdict]:  # fmt: skip
    """Returns whether every number is the exact one, and the gradient the one that came."""
    x = draw(seed, device, dtype, *shape) * size
    x[..., : shape[-1] // 3] *= 0.01
    x = x.to(dtype).requires_grad_()
    found = mx_fake_quantize(x, element)
    exact = mx.fake_quantize(x.detach(), element)
    grad = draw(seed + 1, device, dtype, *shape).to(dtype)
    (back,) = torch.autograd.grad(found, x, grad)
    name = f"mx {element} {shape} size {size:g} {str(dtype).removeprefix('torch.')}"
    return [
        Verdict(name, 0.0 if torch.equal(found.detach(), exact) else 2.0, 0.0),
        Verdict(f"{name} gradient", 0.0 if torch.equal(back, grad) else 2.0, 0.0),
    ]


def histogram_verdict(
    tokens: int, experts: int, top_k: int, bins: int, device: torch.device, seed: int = 0
) -> Verdict:
    """Returns whether every count is the exact one."""
    scores = torch.sigmoid(draw(seed, device, torch.float32, tokens, experts).float())
    alpha = scores.topk(min(top_k + 1, experts), -1).values[:, -1]
    args = (scores, alpha, -1.0, 1.0, bins)
    same = torch.equal(balance_histogram(*args), balance.histogram(*args))
    return Verdict(f"balance_histogram {tokens} x {experts}", 0.0 if same else 2.0, 0.0)


def misc_verdicts(device: torch.device, dtype: torch.dtype) -> list[Verdict]:
    """Returns all of these at small shapes."""
    found = verify(newton_schulz_check((2, 40, 70), dtype, device), dtype)
    for element in mx.ELEMENTS:
        found += mx_verdicts((3, 100), element, dtype, device)
    return [*found, histogram_verdict(50, 9, 2, 100, device)]
