"""The loss of a draft head q against a frozen goal p in plain torch (arXiv 2602.23881).

L = mean over tokens of -log sum_x min(p(x), q(x)). The sum is the share of drafts that
speculative decoding accepts: one less the total variation distance. Of distributions that
hardly overlap it is less than any fp32 number, so its logarithm is made from logarithms.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from flopwright.kernels.linear_cross_entropy.reference import logits_part, parts

# Hidden states [N, H], weight [V, H], log-sum-exp in two parts [2, N].
Side = tuple[Tensor, Tensor, Tensor]
NEAR: Final = -60.0  # sums of e^x need no other level where the largest x is above
FAR: Final = -1e30


def lk_loss(logits: Tensor, goal: Tensor) -> Tensor:
    """Returns the mean loss in nats of draft logits [N, V] against the goal's [N, V]."""
    q, p = logits.log_softmax(-1), goal.log_softmax(-1)
    return -torch.minimum(p, q).logsumexp(-1).mean()


def linear_lk_loss(x: Tensor, weight: Tensor, y: Tensor, goal_weight: Tensor) -> Tensor:
    """Returns the same from hidden states and heads, the logits whole: the oracle of `op.py`."""
    return lk_loss(x @ weight.t(), (y @ goal_weight.t()).detach())


def _log_probabilities(side: Side, first: int, end: int) -> Tensor:
    x, weight, (level, log_sum) = side[0], side[1], side[2].unsqueeze(-1)
    return logits_part(x, weight, first, end).sub_(level).sub_(log_sum)


def _base(highest: Tensor) -> Tensor:
    """Returns the level of a sum of e^x: none where it keeps its digits without one."""
    return torch.where(highest > NEAR, 0.0, highest)


def overlap(draft: Side, goal: Side) -> tuple[Tensor, Tensor]:
    """Returns (log of the sum of min(p, q), share of it where q < p), each [N]."""
    highest = draft[2].new_full(draft[2].shape[1:], FAR)
    shared, below = highest.new_zeros(highest.shape), highest.new_zeros(highest.shape)
    for first, end in parts(draft[1].shape[0]):
        q, p = _log_probabilities(draft, first, end), _log_probabilities(goal, first, end)
        less = torch.minimum(p, q)
        higher = torch.maximum(highest, less.amax(-1))
        shrink, terms = (_base(highest) - _base(higher)).exp(), (less.T - _base(higher)).T.exp()
        shared = shared * shrink + terms.sum(-1)
        below = below * shrink + (terms * (q < p)).sum(-1)
        highest = higher
    return _base(highest) + shared.log(), below / shared


def gradient_part(
    draft: Side, goal: Side, shared: Tensor, below: Tensor, grad: Tensor, first: int, end: int
) -> Tensor:
    """Returns the gradient [N, end - first] of the draft's logits of some columns.

    With S = sum min(p, q) and A = sum of q where q < p:
    dL/dz_i = -q_i (1[q_i < p_i] - A) / S. `shared` is log S, `below` A / S. No exponent below
    is above 0: where q_i < p_i it is one of the terms of S.
    """
    q, p = _log_probabilities(draft, first, end), _log_probabilities(goal, first, end)
    shared, below = shared.unsqueeze(-1), below.unsqueeze(-1)
    under = (q - shared).clamp(max=0.0).exp() * (below * shared.exp() - 1.0)
    d = torch.where(q < p, under, q.exp() * below)
    return d.mul_(grad / q.shape[0]).to(draft[0].dtype)
