"""What carries Kimi Delta Attention's state across ranks (arXiv 2607.24653, 5.1.2), in torch.

A run of tokens makes of the state S before it the state M S + A behind it, where A is the state
that it makes from zeros and M the product of its transitions (I - beta k k^T) Diag(e^g). Ranks
that hold runs of one sequence exchange (A, M), whatever their tokens. Backward the gradient D of
the state behind a run becomes M^T D + E before it, E being what the run's own results ask for.
B batch, T tokens, H heads, K key width, V value width, N runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.kda.reference import _chunks, _prepared


def summary(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Returns (A, M) of a run side by side, [B, H, K, V + K], at least fp32.

    Both in one pass: columns of the state that begin with the identity and take no values
    become M.

    Args:
        k: [B, T, H, K]; v: [B, T, H, V]; g: [B, T, H, K]; beta: [B, T, H].
    """
    batch, _, heads, width = k.shape
    c = _prepared(k, k, F.pad(v, (0, width)), g, beta, 1.0)
    begin = torch.eye(width, dtype=c.k.dtype, device=k.device)
    state = F.pad(begin, (v.shape[-1], 0)).expand(batch, heads, -1, -1)
    for n in range(c.k.shape[0]):
        state = c.next_state(n, state, c.changes(n, state)[1])
    return state.contiguous()


def state_gradient(
    grad: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, scale: float
) -> Tensor:
    """Returns E [B, H, K, V] of a run, at least fp32: chunks from the last, no state is needed.

    Args:
        grad: of the run's results, [B, T, H, V]; the others as in `reference.chunked`.
    """
    c = _prepared(q, k, k, g, beta, scale)
    d_out = _chunks(grad.to(c.q.dtype))
    d_state = d_out.new_zeros(*d_out.shape[1:3], k.shape[-1], grad.shape[-1])
    for n in reversed(range(d_out.shape[0])):
        d_change = c.pairs[n].mT @ d_out[n] + (c.rest[n] * c.k[n]) @ d_state
        d_missing = c.beta[n] * c.solve(n, d_change, back=True)
        d_state = c.last[n].mT * d_state + (c.grown[n] * c.q[n]).mT @ d_out[n]
        d_state = d_state - (c.grown[n] * c.k[n]).mT @ d_missing
    return d_state


def carried(summaries: Sequence[Tensor], own: Sequence[int], *, back: bool) -> Tensor:
    """Returns the states before the runs `own`, [own, B, H, K, V].

    Every rank goes through all runs whatever are its own: the same work everywhere.

    Args:
        summaries: of all N runs in the sequence's order, each [B, H, K, V + K].
        back: they are (E, M), and the gradients of the states behind the runs are returned.
    """
    width = summaries[0].shape[-2]
    order = list(range(len(summaries)))[:: -1 if back else 1]
    found: dict[int, Tensor] = {}
    state: Tensor | None = None
    for place in order:
        sizes = [summaries[place].shape[-1] - width, width]
        made, through = torch.split(summaries[place], sizes, -1)
        if state is None:
            found[place], state = torch.zeros_like(made), made
            continue
        found[place] = state
        if place != order[-1]:
            state = (through.mT if back else through) @ state + made
    return torch.stack([found[place] for place in own])
