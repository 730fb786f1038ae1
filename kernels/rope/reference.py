"""Rotary position embedding (arXiv 2104.09864) in plain torch: the oracle of `op.py`."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Returns x [batch, seq, heads, width] with its pairs turned by their angles.

    Args:
        cos, sin: [seq, width / 2], at least fp32.
        interleaved: pairs are (0, 1), (2, 3), ... as in DeepSeek's weights; otherwise
            (i, i + width / 2) as in Llama's.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    wide = x.to(cos.dtype)
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)
    a, b = wide.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, start: int, interleaved: bool) -> Tensor:
    """Returns x with its last dimension rotated from column `start` on."""
    turned = rotate(x[..., start:], cos, sin, interleaved)
    return torch.cat((x[..., :start], turned), -1)


def mla_key_value(
    kv: Tensor, key: Tensor, cos: Tensor, sin: Tensor, nope: int
) -> tuple[Tensor, Tensor]:
    """Returns MLA's keys [batch, seq, heads, nope + rope] and values [batch, seq, heads, v].

    Args:
        kv: [batch, seq, heads, nope + v], the up-projected latent.
        key: [batch, seq, rope], the rotary key that all heads share.
    """
    turned = rotate(key.unsqueeze(2), cos, sin, True)
    shared = turned.expand(*kv.shape[:3], turned.shape[-1])
    return torch.cat((kv[..., :nope], shared), -1), kv[..., nope:].contiguous()
