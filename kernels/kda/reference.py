"""Kimi Delta Attention in plain torch (arXiv 2510.26692): token by token, and in chunks.

A head keeps a state S [K, V]. With log-decays g <= 0 by channel and a rate beta:

    S_t = (I - beta_t k_t k_t^T) Diag(e^g_t) S_{t-1} + beta_t k_t v_t^T;  o_t = scale S_t^T q_t

B batch, T tokens, H heads, K key width, V value width. Callers give k of length 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype

CHUNK: Final = 16


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (o [B, T, H, V], the last state [B, H, K, V]), token by token.

    Args:
        q, k: [B, T, H, K]; v: [B, T, H, V]; g: [B, T, H, K]; beta: [B, T, H].
        state: [B, H, K, V], before the first token.
    """
    outs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        seen = (state * k[:, t].unsqueeze(-1)).sum(-2)
        change = beta[:, t].unsqueeze(-1) * (v[:, t] - seen)
        state = state + k[:, t].unsqueeze(-1) * change.unsqueeze(-2)
        outs.append((state * (q[:, t] * scale).unsqueeze(-1)).sum(-2))
    out = torch.stack(outs, 1) if outs else v.new_zeros(v.shape)
    return out, state


def _chunks(x: Tensor) -> Tensor:
    """Returns [B, T, H, ...] as [chunks, B, H, CHUNK, ...], zeros behind the end."""
    padding = [0, 0] * (x.ndim - 2) + [0, -x.shape[1] % CHUNK]
    padded = F.pad(x, padding)
    parts: Tensor = padded.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
    return parts.transpose(2, 3).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """What chunks need, first axis the chunks: [chunks, B, H, CHUNK, ...]; see `chunked`.

    Attributes:
        decay: e^(G_i - G_j) by channel on and below the diagonal, else 0: [..., i, j, K].
        pairs: q_i . decay k_j; keys: the same of k_i, below the diagonal.
        grown: e^G; rest: e^(G_C - G); last: e^G_C [..., 1, K].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    pairs: Tensor
    keys: Tensor
    grown: Tensor
    rest: Tensor
    last: Tensor

    def changes(self, n: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (v less what the state knows, what is added to the state) of chunk n."""
        missing = self.v[n] - (self.grown[n] * self.k[n]) @ state
        return missing, self.solve(n, self.beta[n] * missing)

    def solve(self, n: int, right: Tensor, back: bool = False) -> Tensor:
        """Returns (I + beta keys)^-1 right, or its transpose's."""
        below = self.beta[n] * self.keys[n]
        matrix = below + torch.eye(CHUNK, dtype=below.dtype, device=below.device)
        solved: Tensor = torch.linalg.solve_triangular(
            matrix.mT if back else matrix, right, upper=back, unitriangular=True
        )
        return solved

    def next_state(self, n: int, state: Tensor, change: Tensor) -> Tensor:
        """Returns the state after chunk n."""
        return self.last[n].mT * state + (self.rest[n] * self.k[n]).mT @ change


def _prepared(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> _Chunks:
    dtype = wide_dtype(q.dtype)
    q, k, v, g = (_chunks(x.to(dtype)) for x in (q, k, v, g))
    q = q * scale
    total = g.cumsum(-2)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    gap = total.unsqueeze(-2) - total.unsqueeze(-3)
    decay = gap.masked_fill(~lower.unsqueeze(-1), float("-inf")).exp()
    decayed, last = decay * k.unsqueeze(-3), total[..., -1:, :]
    return _Chunks(
        q, k, v, _chunks(beta.to(dtype)).unsqueeze(-1), decay,
        (q.unsqueeze(-2) * decayed).sum(-1), (k.unsqueeze(-2) * decayed).sum(-1).tril(-1),
        total.exp(), (last - total).exp(), last.exp(),
    )  # fmt: skip


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """Returns chunks [B, H, CHUNK, ...] as [B, T, H, ...], of the shape and dtype of `like`."""
    if not parts:
        return like.new_empty(like.shape)
    together = torch.stack(parts).transpose(0, 1).transpose(2, 3)
    return together.flatten(1, 2)[:, : like.shape[1]].contiguous().to(like.dtype)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the same in chunks of tokens, at least fp32 inside.

    With G the running sum of g in a chunk, L_ij = beta_i k_i . (e^(G_i - G_j) k_j) below the
    diagonal and W = (I + L)^-1 beta (v - (e^G k) S): o = (e^G q) S + tril(q . e^(G_i-G_j) k) W
    and S' = e^G_C S + (e^(G_C - G) k)^T W.
    """
    c = _prepared(q, k, v, g, beta, scale)
    state, outs = state.to(c.q.dtype), []
    for n in range(c.q.shape[0]):
        _, change = c.changes(n, state)
        outs.append((c.grown[n] * c.q[n]) @ state + c.pairs[n] @ change)
        state = c.next_state(n, state, change)
    return _joined(outs, v), state


def chunked_backward(
    grad: Tensor, grad_end: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    scale: float, state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k, v, g, beta and the first state, chunks from the last."""
    c = _prepared(q, k, v, g, beta, scale)
    states = [state.to(c.q.dtype)]
    for n in range(c.q.shape[0]):
        states.append(c.next_state(n, states[n], c.changes(n, states[n])[1]))
    d_out, d_state = _chunks(grad.to(c.q.dtype)), grad_end.to(c.q.dtype)
    found: list[tuple[Tensor, ...]] = []
    for n in reversed(range(c.q.shape[0])):
        of_inputs, d_state = _chunk_gradients(c, n, states[n], d_out[n], d_state)
        found.insert(0, (of_inputs[0] * scale, *of_inputs[1:]))
    dq, dk, dv, dg, dbeta = (
        _joined([f[i] for f in found], x) for i, x in enumerate((q, k, v, g, beta))
    )
    return dq, dk, dv, dg, dbeta, d_state


def _crossing(pairs: Tensor, before: Tensor, behind: Tensor) -> Tensor:
    """Returns for each token the sum [..., C, K] of what decays over it.

    Differences of running sums would say the same, and lose the digits of slow decays beside
    what a token is to itself.

    Args:
        pairs: [..., i, j, K], from token j to i > j; what is on the diagonal decays over none.
        before, behind: [..., C, K], from before the chunk to a token, and from it to behind.
    """
    from_here = pairs.flip(-3).cumsum(-3).flip(-3)  # over i at least the token's place
    earlier = torch.ones(pairs.shape[-3:-1], dtype=torch.bool, device=pairs.device).tril(-1)
    inside = (from_here * earlier.unsqueeze(-1)).sum(-2)
    left = F.pad(behind.cumsum(-2)[..., :-1, :], (0, 0, 1, 0))
    found: Tensor = inside + before.flip(-2).cumsum(-2).flip(-2) + left
    return found


def _chunk_gradients(
    c: _Chunks, n: int, state: Tensor, d_out: Tensor, d_next: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns (gradients of the chunk's q, k, v, g, beta, gradient of the state before it)."""
    q, k, decay, grown, rest = c.q[n], c.k[n], c.decay[n], c.grown[n], c.rest[n] * c.k[n]
    missing, change = c.changes(n, state)
    d_change = c.pairs[n].mT @ d_out + rest @ d_next
    d_right = c.solve(n, d_change, back=True)
    d_below = -(d_right @ change.mT).tril(-1)
    d_missing = c.beta[n] * d_right
    d_beta = (d_right * missing).sum(-1) + (d_below * c.keys[n]).sum(-1)
    d_pairs, d_keys = (d_out @ change.mT).tril(), c.beta[n] * d_below
    d_rest, last = change @ d_next.mT, c.last[n].squeeze(-2)
    to_q, to_k = d_pairs.unsqueeze(-1) * decay, d_keys.unsqueeze(-1) * decay
    of_q, of_k = grown * (d_out @ state.mT), -grown * (d_missing @ state.mT)
    dq = (to_q * k.unsqueeze(-3)).sum(-2) + of_q
    dk_row = (to_k * k.unsqueeze(-3)).sum(-2) + of_k
    columns = to_q * q.unsqueeze(-2) + to_k * k.unsqueeze(-2)
    dk_column = columns.sum(-3) + c.rest[n] * d_rest
    dg = _crossing(columns * k.unsqueeze(-3), q * of_q + k * of_k, rest * d_rest)
    dg = dg + (last * (state * d_next).sum(-1)).unsqueeze(-2)
    d_state = last.unsqueeze(-1) * d_next
    d_state = d_state + (grown * q).mT @ d_out - (grown * k).mT @ d_missing
    return (dq, dk_row + dk_column, d_missing, dg, d_beta), d_state
