"""What the core of an attention block costs and keeps: products of queries, keys and values.

With context parallelism a rank holds seq_len / cp tokens. It sees the keys and values of the
others as they go round the group ("ring") or once they are gathered ("all_gather"): the same
bytes. With "ulysses" (arXiv 2309.14509) the group exchanges heads for tokens instead.
"""

from __future__ import annotations

import numpy as np

from flopwright.kernels.attention.cost import attention, unfused_attention
from flopwright.kernels.rms_norm.cost import wide_bytes
from flopwright.models.local import Local
from flopwright.ops import Array, Collective, CostBuilder, Phase
from flopwright.spec.packing import causal_share

TAG_CORE = "core_attn"


def core_attention(
    cost: CostBuilder,
    local: Local,
    *,
    heads: Array,
    kv_heads: Array,
    qk_width: int,
    v_width: int,
    window: int | None = None,
) -> None:
    """Adds the exchange over the context group, the kernels and what they keep.

    A fused kernel keeps its result and one number a query and head; unfused ones keep the
    softmax of all scores instead of that number.
    """
    t, width, kernel = local.tokens, local.width, local.shape.attention_kernel
    keys, values = t * kv_heads * qk_width * width, t * kv_heads * v_width * width
    _gather_context(cost, local, keys + values)
    queries, out = t * heads * qk_width * width, t * heads * v_width * width
    _exchange_heads(cost, local, queries + keys + values, out)
    add = unfused_attention if kernel == "unfused" else attention
    add(
        cost,
        "attention",
        sequences=np.asarray(local.shape.micro_batch_size, float),
        seq_len=local.shape.seq_len,
        heads=heads,
        kv_heads=kv_heads,
        qk_width=qk_width,
        v_width=v_width,
        dtype=local.dtype,
        cp=local.cp,
        window=window,
        ulysses=local.ulysses,
        share=_share(local, window),
    )
    cost.saved("attention.out", out)
    if local.ulysses.any():
        # Attention keeps its heads' result, and the projection behind it its tokens'.
        cost.saved("attention.heads_out", np.where(local.ulysses, out, 0.0))
    if kernel == "unfused":
        seq_len = np.asarray(local.shape.seq_len, float)
        cost.saved("attention.softmax", t * heads * seq_len * width, tag=TAG_CORE)
    else:
        cost.saved("attention.lse", t * heads * wide_bytes(local.dtype))


def _share(local: Local, window: int | None) -> Array:
    """Returns which share of causal pairs the documents of a row leave."""
    documents = local.shape.documents
    lengths = np.asarray(local.shape.seq_len, float)
    if not documents:
        return np.ones_like(lengths)
    found = [causal_share(documents, int(s), window) for s in lengths.ravel()]
    return np.array(found).reshape(lengths.shape)


def _gather_context(cost: CostBuilder, local: Local, nbytes: Array) -> None:
    """Adds the way of keys and values over the context group, and its backward.

    Each rank keeps its own part (`nbytes`), sees the rest again in the backward pass and
    reduce-scatters the gradients.
    """
    whole = nbytes * local.cp
    count = np.where((local.cp > 1) & ~local.ulysses, 1.0, 0.0)
    for collective, phase in (
        (Collective.ALL_GATHER, Phase.FORWARD),
        (Collective.ALL_GATHER, Phase.BACKWARD_INPUT),
        (Collective.REDUCE_SCATTER, Phase.BACKWARD_INPUT),
    ):
        cost.comm("kv_context", collective, "cp", phase, nbytes=whole, count=count)


def _exchange_heads(cost: CostBuilder, local: Local, inputs: Array, out: Array) -> None:
    """Adds the exchanges of queries, keys and values in one message, and of results in another.

    Their gradients take the same ways back.
    """
    if not local.ulysses.any():
        return
    leaving, count = (local.cp - 1) / local.cp, np.where(local.ulysses, 1.0, 0.0)
    for name, nbytes in (("heads", inputs), ("heads_out", out)):
        for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT):
            cost.comm(
                name, Collective.ALL_TO_ALL, "cp", phase, nbytes=nbytes * leaving, count=count
            )
