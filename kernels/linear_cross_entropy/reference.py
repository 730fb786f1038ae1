"""Head and cross-entropy in plain torch, one part of the vocabulary at a time.

N tokens, H hidden, V vocabulary. A part's logits stand in memory, never all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype

PARTS: Final = 16  # so a part is a sixteenth of the logits
_MULTIPLE: Final = 128


def parts(vocab: int) -> Iterator[tuple[int, int]]:
    """Yields the first and the last column (excluded) of each part."""
    width = max(_MULTIPLE, -(-vocab // (PARTS * _MULTIPLE)) * _MULTIPLE)
    for first in range(0, vocab, width):
        yield first, min(vocab, first + width)


def statistics(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (log-sum-exp in two parts [2, N], the target's logit [N]), at least fp32.

    The parts are the largest logit and the logarithm of the sum of e^(logit - it): their sum
    alone would lose the latter's digits where logits are large. Targets -1 give 0.
    """
    dtype = wide_dtype(x.dtype)
    level = x.new_full((x.shape[0],), float("-inf"), dtype=dtype)
    total = x.new_zeros(x.shape[0], dtype=dtype)
    chosen = x.new_zeros(x.shape[0], dtype=dtype)
    for first, end in parts(weight.shape[0]):
        logits = logits_part(x, weight, first, end)
        higher = torch.maximum(level, logits.amax(-1))
        more = (logits - higher.unsqueeze(-1)).exp().sum(-1)
        total, level = total * (level - higher).exp() + more, higher
        inside = (targets >= first) & (targets < end)
        places = (targets - first) * inside
        chosen = chosen + logits.gather(-1, places.unsqueeze(-1)).squeeze(-1) * inside
    return torch.stack((level, total.log())), chosen


def logits_part(x: Tensor, weight: Tensor, first: int, end: int) -> Tensor:
    """Returns the logits [N, end - first] of some columns, at least fp32."""
    dtype = wide_dtype(x.dtype)
    return x.to(dtype) @ weight[first:end].to(dtype).t()


def gradient_part(
    x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, grad: Tensor, first: int, end: int
) -> Tensor:
    """Returns the gradient [N, end - first] of the logits of some columns, like x."""
    level, log_sum = lse.unsqueeze(-1)
    p = logits_part(x, weight, first, end).sub_(level).sub_(log_sum).exp_()
    inside = (targets >= first) & (targets < end)
    places = (targets - first) * inside
    p.scatter_add_(-1, places.unsqueeze(-1), -inside.to(p.dtype).unsqueeze(-1))
    d: Tensor = p.mul_(grad / x.shape[0])
    return d.to(x.dtype)


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Returns out + a @ b in `out`, which is at least fp32 whatever a and b are."""
    if a.dtype == out.dtype:
        return out.addmm_(a, b)
    if a.is_cuda:  # summed in fp32 without copies of a and b
        return out.add_(torch.mm(a, b, out_dtype=out.dtype))
    return out.addmm_(a.to(out.dtype), b.to(out.dtype))


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean nats a token, the logits whole: the oracle of `op.py`."""
    logits = x @ weight.t()
    return torch.nn.functional.cross_entropy(logits, targets)
