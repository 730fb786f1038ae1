"""Attention of some queries to one block of keys: what rank after rank adds under context cuts.

A block is either a rank's own tokens, causal among themselves, or tokens that all of the
queries see. Results of blocks are joined by their log-sum-exps (`merge_`), and the gradients
of a block follow from the joined result and log-sum-exp (arXiv 2310.01889; arXiv 2205.14135,
algorithm 4), so that no block keeps anything.

CPU: torch's flash kernel. CUDA: torch's flash kernel in bf16 and fp16, the plain form else.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.attention import reference
from flopwright.kernels.launch import unit_columns
from flopwright.kernels.linear.reference import wide_dtype

_ALIGNMENT: Final = 8  # head widths that the CUDA kernel takes are multiples of 8
FLASH_DTYPES: Final = (torch.bfloat16, torch.float16)


def heads_first(x: Tensor, width: int) -> Tensor:
    """Returns [B, S, H, D] as [B, H, S, width], the columns next to each other.

    torch's kernels read rows without asking for their columns' stride.
    """
    wide = F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
    return unit_columns(wide).transpose(1, 2)


def prepared(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v heads first, one key/value head for each query head, equal widths."""
    widest, repeat = max(q.shape[-1], v.shape[-1]), q.shape[2] // k.shape[2]
    width = -(-widest // _ALIGNMENT) * _ALIGNMENT if q.is_cuda else widest
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    return heads_first(q, width), heads_first(k, width), heads_first(v, width)


def _plain(q: Tensor) -> bool:
    return q.is_cuda and q.dtype not in FLASH_DTYPES


@torch.library.custom_op("flopwright::attention_block", mutates_args=())
def attention_block(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Returns (softmax(scale * q k^T) v as [B, S, H, V], log-sum-exp [B, H, S]) over T keys.

    Not differentiable by itself: `attention_block_backward` needs the result over all blocks.

    Args:
        q: [B, S, H, D]; k: [B, T, G, D]; v: [B, T, G, V], G dividing H.
        causal: query i sees keys 0 .. i (S = T); otherwise every query sees every key.
    """
    if _plain(q):
        return reference.attention_block(q, k, v, scale, causal)
    queries, keys, values = prepared(q, k, v)
    if q.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            queries, keys, values, 0.0, causal, False, scale=scale
        )
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, causal, scale=scale
        )
    out = out[..., : v.shape[-1]].transpose(1, 2)
    return out.contiguous(), lse.contiguous()


@attention_block.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _width = q.shape
    out = q.new_empty((batch, seq, heads, v.shape[-1]))
    return out, q.new_empty((batch, heads, seq), dtype=wide_dtype(q.dtype))


@torch.library.custom_op("flopwright::attention_block_backward", mutates_args=())
def attention_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the block's part of the gradient of q, and those of its k and v.

    Args:
        grad, out: [B, S, H, V] and lse [B, H, S]: of the result over all blocks.
    """
    if _plain(q):
        return reference.attention_block_backward(grad, q, k, v, out, lse, scale, causal)
    queries, keys, values = prepared(q, k, v)
    width = queries.shape[-1]
    gradient, result = heads_first(grad, width), heads_first(out, width)
    if q.is_cuda:
        unused = torch.zeros((), dtype=torch.uint64, device=q.device)  # random state of dropout
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, queries, keys, values, result, lse.contiguous(), None, None, q.shape[1],
            k.shape[1], 0.0, causal, unused, unused, scale=scale,
        )  # fmt: skip
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, queries, keys, values, result, lse.contiguous(), 0.0, causal, scale=scale
        )

    def back(g: Tensor, like: Tensor) -> Tensor:
        g = g[..., : like.shape[-1]].transpose(1, 2)
        if g.shape[2] != like.shape[2]:
            g = g.reshape(*like.shape[:3], -1, like.shape[3]).sum(3)
        return g.contiguous()

    return back(found[0], q), back(found[1], k), back(found[2], v)


@attention_block_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def merge_(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Joins the result over further keys to `out` and `lse`, in place.

    Args:
        out: [B, S, H, V] at least fp32; lse: [B, H, S]; more, more_lse: the same shapes.
    """
    joined = torch.logaddexp(lse, more_lse)

    def share(part: Tensor) -> Tensor:
        return torch.exp(part - joined).transpose(1, 2).unsqueeze(-1)

    out.mul_(share(lse)).addcmul_(more.to(out.dtype), share(more_lse))
    lse.copy_(joined)
