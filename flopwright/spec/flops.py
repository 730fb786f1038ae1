"""Model FLOPs a token: the reporting conventions behind MFU. Executed FLOPs are in cost.py."""

from __future__ import annotations

from typing import Final, Literal

from flopwright.spec.model import KdaAttention, MlaAttention, ModelSpec
from flopwright.spec.parameters import num_active_params

Convention = Literal["causal_half", "full", "params_only"]


# Tokens of a chunk in the convention of arXiv 2510.26692, equation 13.
KDA_CHUNK: Final = 64


def linear_attention_flops_per_token(attention: KdaAttention) -> float:
    """Returns forward FLOPs a token of one layer: 6 d^2 + 3 C d + C^2 a head, C = 64."""
    d, c = attention.head_dim, KDA_CHUNK
    return float(attention.num_heads * (6 * d * d + 3 * c * d + c * c))


def attention_flops_per_token(
    spec: ModelSpec, seq_len: int, convention: Convention = "causal_half"
) -> float:
    """Returns forward and backward FLOPs a token of the score and value products, all layers.

    Forward, full square: 2 * seq_len * heads * (qk width + v width); backward twice that.
    Under a sliding window w a token sees w - w^2 / (2 seq_len) positions, on average and
    causally, where it would see seq_len / 2; both conventions shrink by that, and so they do
    where an indexer chooses w positions. Its scores count forward alone, over all positions.
    Linear attention counts the same in both (`linear_attention_flops_per_token`).
    """
    if convention == "params_only":
        return 0.0
    attn, seen, linear = spec.attention, 0.0, 0.0
    index = attn.indexer if isinstance(attn, MlaAttention) else None
    scores = 0.0
    for layer in range(spec.num_layers + spec.mtp_layers):
        own = spec.attention_of(layer)
        if isinstance(own, KdaAttention):
            linear += 3 * linear_attention_flops_per_token(own)
            continue
        w = min(spec.sliding_window(layer) or seq_len, seq_len)
        if index is not None:
            w = min(w, index.top_k)
            scores += 2.0 * seq_len * index.num_heads * index.head_dim
        seen += 2 * w - w * w / seq_len
    full = scores + 3 * 2 * seen * attn.num_heads * (attn.qk_head_dim + attn.v_head_dim)
    return (full / 2 if convention == "causal_half" else float(full)) + linear


def model_flops_per_token(
    spec: ModelSpec, seq_len: int, convention: Convention = "causal_half"
) -> float:
    """Returns the FLOPs a trained token counts for: 6 a weight that multiplies it, plus attention.

    The input embedding is a lookup and does not count; the output head does.
    """
    return 6.0 * num_active_params(spec) + attention_flops_per_token(spec, seq_len, convention)


def training_flops(num_active: float, tokens: float) -> float:
    """Returns the FLOPs of a training run by 6ND (arXiv 2001.08361)."""
    return 6.0 * num_active * tokens


def hardware_flops_per_token(
    spec: ModelSpec, seq_len: int, convention: Convention = "full"
) -> float:
    """Returns the FLOPs a token executes where every layer's forward pass runs twice.

    Model FLOPs plus a third of the layers' again (full recompute): what arXiv 2104.04473
    reports, 96 B s l h^2 (1 + s / 6h + V / 16lh) for a GPT. The output head runs once.
    """
    whole = model_flops_per_token(spec, seq_len, convention)
    head = 6.0 * (num_active_params(spec) - num_active_params(spec, head=False))
    return whole + (whole - head) / 3
