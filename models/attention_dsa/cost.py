"""What DeepSeek sparse attention costs and keeps. Its input is kept by the layer.

Candidates whose sequences are no longer than top_k have latent attention's own rows; longer
ones attend in the latent. Tensor-parallel ranks share the heads and, for the indexer, the
queries: each chooses for its part, and all learn what the others chose.
"""

from __future__ import annotations

import numpy as np

from flopwright.kernels.layer_norm.cost import layer_norm, statistics_bytes
from flopwright.kernels.linear.cost import linear
from flopwright.kernels.rms_norm.cost import wide_bytes
from flopwright.kernels.rope.cost import rope
from flopwright.kernels.sparse_attention.cost import (
    INDEX_BYTES,
    Choice,
    head_linear,
    index_loss,
    select_keys,
    selected_attention,
)
from flopwright.models.attention_mla.cost import TAG_UP, latents, output, over_all, queries
from flopwright.models.local import Local
from flopwright.ops import Array, Collective, CostBuilder, Phase
from flopwright.spec.model import Indexer, MlaAttention


def sparse_latent_attention(
    cost: CostBuilder, spec: MlaAttention, hidden: int, local: Local
) -> None:
    """Adds the rows of one block."""
    queries(cost, spec, hidden, local)
    latents(cost, spec, hidden, local)
    _index(cost, spec, hidden, local)
    seq_len = np.asarray(local.shape.seq_len, float)
    chosen = np.atleast_1d(seq_len > _indexer(spec).top_k)
    for rows, mine in ((_over_all, ~chosen), (_over_chosen, chosen)):
        if mine.all():
            rows(cost, spec, local)
        elif mine.any():
            part = CostBuilder()
            rows(part, spec, local)
            cost.extend(part.build(mine.size), repeat=mine.astype(float))
    output(cost, spec, hidden, local)


def _indexer(spec: MlaAttention) -> Indexer:
    assert spec.indexer is not None
    return spec.indexer


def _index(cost: CostBuilder, spec: MlaAttention, hidden: int, local: Local) -> None:
    """Adds the indexer's projections, of a rank's own tokens; its keys reach every rank.

    No gradient leaves it.
    """
    index, rows, dtype = _indexer(spec), local.shard_tokens, local.dtype
    width, inner = index.head_dim, index.num_heads * index.head_dim
    assert spec.q_lora_rank is not None
    linear(
        cost, "indexer.wq_b", rows=rows, k=spec.q_lora_rank, n=inner, dtype=dtype,
        input_gradient=False,
    )  # fmt: skip
    linear(cost, "indexer.wk", rows=rows, k=hidden, n=width, dtype=dtype, input_gradient=False)
    cost.saved("indexer.wk.out", rows * width * local.width)
    layer_norm(cost, "indexer.k_norm", rows=rows, width=width, dtype=dtype)
    cost.saved("indexer.k_norm.statistics", statistics_bytes(rows, dtype))
    wide = "fp64" if dtype == "fp64" else "fp32"
    linear(
        cost, "indexer.weights_proj", rows=rows, k=hidden, n=index.num_heads, dtype=dtype,
        compute_dtype=wide, input_gradient=False,
    )  # fmt: skip
    rope(cost, "indexer.rope", elements=rows * (inner + width), dtype=dtype)
    cost.saved("indexer.q", rows * inner * local.width)
    cost.saved("indexer.k", rows * width * local.width)
    cost.saved("indexer.weights", rows * index.num_heads * wide_bytes(dtype))
    _over_tp(cost, "indexer.k", Collective.ALL_GATHER, local, local.tokens * width * local.width)


def _over_tp(cost: CostBuilder, name: str, kind: Collective, local: Local, nbytes: Array) -> None:
    """Adds what tensor-parallel ranks with tokens of their own tell each other, forward."""
    count = np.where((local.tp > 1) & local.sequence_parallel, 1.0, 0.0)
    if count.any():
        cost.comm(name, kind, "tp", Phase.FORWARD, nbytes=nbytes, count=count)


def _choice(spec: MlaAttention, local: Local) -> Choice:
    index = _indexer(spec)
    return Choice(
        sequences=local.shape.micro_batch_size, seq_len=local.shape.seq_len, top_k=index.top_k,
        heads=float(index.num_heads), width=index.head_dim, dtype=local.dtype, cp=local.cp,
    )  # fmt: skip


def _context(cost: CostBuilder, name: str, local: Local, width: int) -> None:
    """Adds the way of keys over the context group, and that of their gradients."""
    count = np.where(local.cp > 1, 1.0, 0.0)
    if not count.any():
        return
    nbytes = local.tokens * local.cp * width * local.width
    for kind, phase in (
        (Collective.ALL_GATHER, Phase.FORWARD),
        (Collective.ALL_GATHER, Phase.BACKWARD_INPUT),
        (Collective.REDUCE_SCATTER, Phase.BACKWARD_INPUT),
    ):
        cost.comm(name, kind, "cp", phase, nbytes=nbytes, count=count)


def _learns(
    cost: CostBuilder, spec: MlaAttention, local: Local, choice: Choice, width: int
) -> None:
    """Adds the indexer's loss; `width` is that of the queries attention has here."""
    heads, share = spec.num_heads / local.tp, local.shard_tokens / local.tokens
    index_loss(cost, "attention.index_loss", choice, heads=heads, width=width, share=share)
    # Each rank knows what its heads attend to.
    mean = choice.chosen * wide_bytes(local.dtype)
    _over_tp(cost, "attention.index_loss", Collective.REDUCE_SCATTER, local, mean)


def _over_all(cost: CostBuilder, spec: MlaAttention, local: Local) -> None:
    over_all(cost, spec, local)
    _context(cost, "index_context", local, _indexer(spec).head_dim)
    _learns(cost, spec, local, _choice(spec, local), spec.qk_head_dim)


def _over_chosen(cost: CostBuilder, spec: MlaAttention, local: Local) -> None:
    """Adds attention in the latent over the chosen positions."""
    t, heads, dtype = local.tokens, spec.num_heads / local.tp, local.dtype
    choice, rank, rotary = _choice(spec, local), spec.kv_lora_rank, spec.qk_rope_head_dim
    width = rank + rotary
    rope(cost, "kv_rope", elements=t * rotary, dtype=dtype)
    cost.saved("keys", t * width * local.width)
    _context(cost, "kv_context", local, width + _indexer(spec).head_dim)
    head_linear(
        cost, "kv_b_proj.into_latent", rows=t, heads=heads, k=spec.qk_nope_head_dim, n=rank,
        dtype=dtype, tag=TAG_UP,
    )  # fmt: skip
    cost.saved("q_in_latent", t * heads * width * local.width, tag=TAG_UP)
    select_keys(cost, "attention.select", choice, share=local.shard_tokens / t)
    positions = choice.kept * INDEX_BYTES
    _over_tp(cost, "attention.chosen", Collective.ALL_GATHER, local, positions)
    cost.saved("attention.chosen", positions)
    selected_attention(cost, "attention", choice, heads=heads, width=width, v_width=rank)
    cost.saved("attention.out", t * heads * rank * local.width)
    cost.saved("attention.lse", t * heads * wide_bytes(dtype))
    _learns(cost, spec, local, choice, width)
    head_linear(
        cost, "kv_b_proj.out_of_latent", rows=t, heads=heads, k=rank, n=spec.v_head_dim,
        dtype=dtype,
    )  # fmt: skip
    cost.saved("values", t * heads * spec.v_head_dim * local.width)
