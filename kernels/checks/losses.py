"""Checks of the losses that never hold their logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.checks.compare import Check
from flopwright.kernels.checks.experts import draw
from flopwright.kernels.linear_cross_entropy.op import linear_cross_entropy
from flopwright.kernels.lk_loss import reference as lk
from flopwright.kernels.lk_loss.op import linear_lk_loss


def _exact(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((x @ weight.t()).to(torch.promote_types(x.dtype, torch.float32)),
                           targets)  # fmt: skip


def _products(d: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Returns the sums of what the gradient d of the logits is multiplied with; no loss is."""
    size = d.abs()
    return d.new_zeros(()), size @ weight.abs(), size.mT @ x.abs()


def _sums(x: Tensor, weight: Tensor, targets: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    d = (x @ weight.mT).softmax(-1)
    d[torch.arange(len(targets), device=x.device), targets] -= 1
    return _products(d * (grad / len(targets)), x, weight)


def _lk_sums(
    x: Tensor, weight: Tensor, y: Tensor, goal_weight: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    draft, goal = (x @ weight.mT).detach().requires_grad_(), y @ goal_weight.mT
    with torch.enable_grad():
        (d,) = torch.autograd.grad(lk.lk_loss(draft, goal), draft, grad)
    return _products(d, x, weight)


def cross_entropy_check(
    tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device,
    size: float = 1.0, seed: int = 0,
) -> Check:  # fmt: skip
    """Returns head and cross-entropy in one; targets at both ends of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[0], targets[-1] = vocab - 1, 0
    return Check(
        name=f"linear_cross_entropy {tokens} x {hidden} x {vocab} size {size:g}",
        op=lambda *a: linear_cross_entropy(*a)[0],
        exact=_exact,
        tensors=(
            draw(seed, device, dtype, tokens, hidden) * size,
            draw(seed + 1, device, dtype, vocab, hidden),
        ),
        rest=(targets.to(device),),
        magnitude=_sums,
    )


def _lk_plain(x: Tensor, weight: Tensor, y: Tensor, goal_weight: Tensor) -> Tensor:
    """The formula as it stands, without logarithms of the probabilities."""
    q, p = (x @ weight.mT).softmax(-1), (y @ goal_weight.mT).detach().softmax(-1)
    return -torch.minimum(p, q).sum(-1).log().mean()


def lk_check(
    tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device,
    seed: int = 0, size: float = 1.0,
) -> Check:  # fmt: skip
    """Returns the loss of a draft that is near its goal; logits grow with `size`."""
    y, u = (
        draw(seed, device, dtype, tokens, hidden) * size,
        draw(seed + 1, device, dtype, vocab, hidden),
    )
    x = (y + 0.5 * size * draw(seed + 2, device, dtype, tokens, hidden)).to(dtype).double()
    w = (u + 0.2 * draw(seed + 3, device, dtype, vocab, hidden)).to(dtype).double()
    return Check(
        name=f"lk_loss {tokens} x {hidden} x {vocab} size {size:g}",
        op=lambda *a: linear_lk_loss(*a)[0],
        exact=lambda *a: lk.linear_lk_loss(*(t.to(_wide(t)) for t in a)),
        rival=None if size > 1 else lambda *a: _lk_plain(*(t.to(_wide(t)) for t in a)),
        tensors=(x, w, y, u),
        constant=frozenset({2, 3}),
        magnitude=_lk_sums,
    )


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
