"""Checks of causal attention, its gradients and the largest logit of each head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.attention.op import attention_with_max
from flopwright.kernels.checks.compare import Check
from flopwright.kernels.checks.experts import draw


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns output, log-sum-exp and largest logit by head, from the whole score matrix."""
    seq, repeat = q.shape[1], q.shape[2] // k.shape[2]
    keys, values = (t.repeat_interleave(repeat, 2).transpose(1, 2) for t in (k, v))
    scores = (q.transpose(1, 2) @ keys.transpose(-1, -2)) * scale
    i = torch.arange(seq, device=q.device)
    seen = i <= i.unsqueeze(1)
    if window:
        seen = seen & (i > i.unsqueeze(1) - window)
    scores = scores.masked_fill(~seen, float("-inf"))
    out = (scores.softmax(-1) @ values).transpose(1, 2)
    return out, scores.logsumexp(-1), scores.amax((0, 2, 3))


def _torchs(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns torch's own attention, with the two statistics it does not give."""
    seq, mask = q.shape[1], None
    # Key heads are repeated and widths made equal: only then torch takes its flash kernel
    # everywhere, which like ours keeps one number a row.
    repeat, widest = q.shape[2] // k.shape[2], max(q.shape[3], v.shape[3])
    queries, keys, values = (F.pad(t, (0, widest - t.shape[3])) for t in (q, k, v))
    keys, values = (t.repeat_interleave(repeat, 2) for t in (keys, values))
    if 0 < window < seq:
        i = torch.arange(seq, device=q.device)
        mask = (i <= i.unsqueeze(1)) & (i > i.unsqueeze(1) - window)
    out = F.scaled_dot_product_attention(
        queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask,
        is_causal=mask is None, scale=scale,
    )  # fmt: skip
    with torch.no_grad():
        statistics = exact_attention(q.float(), k.float(), v.float(), scale, window)[1:]
    return out[..., : v.shape[3]].transpose(1, 2), *statistics


def _sums(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, grad: Tensor
) -> tuple[Tensor, ...]:
    """Returns the sums of what is rounded on the way to the result and the three gradients.

    Probabilities p are rounded before they meet values and the result's gradient; the logits'
    gradient p (dp - delta) before it meets keys and queries. delta = sum of grad * result
    comes from the result as it is stored, itself a sum of rounded terms.
    """
    seq, repeat = q.shape[1], q.shape[2] // k.shape[2]
    queries, grads = q.transpose(1, 2), grad.transpose(1, 2)
    keys, values = (t.repeat_interleave(repeat, 2).transpose(1, 2) for t in (k, v))
    i = torch.arange(seq, device=q.device)
    seen = i <= i.unsqueeze(1)
    if window:
        seen = seen & (i > i.unsqueeze(1) - window)
    scores = (queries @ keys.mT * scale).masked_fill(~seen, float("-inf"))
    p = scores.softmax(-1)
    out, of_out = p @ values, p @ values.abs()
    d_p, delta = grads @ values.mT, (grads * out).sum(-1, keepdim=True)
    of_delta = (grads.abs() * (out.abs() + of_out)).sum(-1, keepdim=True)
    of_scores = p * ((d_p - delta).abs() + of_delta) * scale
    of_q, of_k = of_scores @ keys.abs(), of_scores.mT @ queries.abs()
    of_v = p.mT @ grads.abs()

    def by_group(x: Tensor) -> Tensor:
        """Returns sums of query heads by their key head, [B, S, G, width]."""
        batch, heads, rows, width = x.shape
        return x.reshape(batch, heads // repeat, repeat, rows, width).sum(2).transpose(1, 2)

    none = torch.zeros((), dtype=q.dtype, device=q.device)
    return of_out.transpose(1, 2), none, none, of_q.transpose(1, 2), by_group(of_k), by_group(of_v)


def attention_check(
    shape: tuple[int, int, int, int], widths: tuple[int, int], dtype: torch.dtype,
    device: torch.device, window: int = 0, size: float = 1.0, seed: int = 0,
) -> Check:  # fmt: skip
    """Returns attention of (batch, positions, query heads, key heads), (qk, v) wide.

    Args:
        size: of queries and keys; 8 makes logits of hundreds.
    """
    batch, seq, heads, groups = shape
    qk, width = widths
    tensors = (
        draw(seed, device, dtype, batch, seq, heads, qk) * size,
        draw(seed + 1, device, dtype, batch, seq, groups, qk) * size,
        draw(seed + 2, device, dtype, batch, seq, groups, width),
    )
    return Check(
        name=f"attention {shape} {widths} window {window} size {size:g}",
        op=attention_with_max,
        exact=exact_attention,
        rival=_torchs,
        tensors=tensors,
        rest=(qk**-0.5, window),
        outputs=1,
        stiff=2,
        magnitude=_sums,
    )
