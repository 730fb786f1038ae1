"""What QK-Clip costs a rank: the recorded maxima, one small message, the scaled rows."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.rms_norm.cost import wide_bytes
from flopwright.ops import Array, BlockCost, Collective, CostBuilder, OpKind, Phase, ShardShape
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.model import GqaAttention, MlaAttention, ModelSpec


def record_cost(
    spec: ModelSpec,
    shape: ShardShape,
    *,
    kernel: Literal["reference", "fused"] = "reference",
    window: int | None = None,
    num_candidates: int = 1,
) -> BlockCost:
    """Returns what recording one layer's maxima adds to a micro-batch's forward pass.

    "reference" computes the scores of all pairs in sight once more, 2 * pairs * qk width;
    "fused" has them from the attention kernel, which then writes one number a head.

    Args:
        window: positions that a query of the layer sees; None for all before it.
    """
    cost, attn = CostBuilder(), spec.attention
    heads = attn.num_heads / np.asarray(shape.tp, float)
    width, tokens, seq = DTYPE_BYTES[shape.dtype], shape.tokens, np.asarray(shape.seq_len, float)
    sequences = np.asarray(shape.micro_batch_size, float)
    cp = np.asarray(shape.cp, float)
    again = 1.0 if kernel == "reference" else 0.0
    shared = attn.num_kv_heads / attn.num_heads if isinstance(attn, GqaAttention) else 1.0
    cost.op(
        "qk_clip.max_logit", OpKind.ATTENTION, Phase.FORWARD, dtype=shape.dtype, kernel=kernel,
        flops=2 * sequences * heads * _pairs(seq, window) / cp * attn.qk_head_dim * again,
        m=seq / cp, n=seq, k=attn.qk_head_dim, batch=sequences * heads,
        read_bytes=(tokens + sequences * seq * shared) * heads * attn.qk_head_dim * width * again,
        written_bytes=heads * wide_bytes(shape.dtype),
    )  # fmt: skip
    return cost.build(num_candidates)


def _pairs(seq: Array, window: int | None) -> Array:
    """Returns the pairs (query, key) in sight of one head in a sequence."""
    w = seq if window is None else np.minimum(seq, window)
    return np.asarray(w * (w + 1) / 2 + (seq - w) * w)


def clipped_weights(spec: ModelSpec) -> int:
    """Returns the weights of a layer that QK-Clip may scale: what q and k alone are made of."""
    attn, hidden = spec.attention, spec.hidden_size
    if isinstance(attn, MlaAttention):
        rank = attn.q_lora_rank or hidden
        keys = attn.num_heads * attn.qk_nope_head_dim * attn.kv_lora_rank
        return attn.num_heads * attn.qk_head_dim * rank + keys
    queries = attn.num_heads * attn.head_dim * hidden
    return queries * (2 if attn.num_heads == attn.num_kv_heads else 1)


def step_cost(
    spec: ModelSpec,
    layers: ArrayLike,
    *,
    tp: ArrayLike = 1,
    weights: str = "bf16",
    clipped: ArrayLike = 1.0,
    num_candidates: int = 1,
) -> BlockCost:
    """Returns the rows of one step: an all-reduce of the maxima and the scaling of the weights.

    The message is one fp32 number a head and layer, whatever the batch (arXiv 2507.20534).

    Args:
        layers: transformer layers that the rank holds.
        clipped: share of heads over the limit; 1 is the upper bound, late in a run it is 0.
    """
    cost = CostBuilder()
    held = np.asarray(layers, float) / np.asarray(tp, float)
    cost.comm(
        "qk_clip.maxima", Collective.ALL_REDUCE, "dp", Phase.STEP,
        nbytes=held * spec.attention.num_heads * DTYPE_BYTES["fp32"],
    )  # fmt: skip
    scaled = held * clipped_weights(spec) * np.asarray(clipped, float)
    nbytes = scaled * DTYPE_BYTES[weights]
    cost.op(
        "qk_clip.scale", OpKind.OPTIMIZER, Phase.STEP, dtype=weights, m=scaled,
        read_bytes=nbytes, written_bytes=nbytes,
    )  # fmt: skip
    return cost.build(num_candidates)
