"""What a KDA block costs and keeps. Its input, the normalised state, is kept by the layer.

Rows that core attention's recompute runs again begin with "attention": convolutions, decays
and the delta rule, from the projections' results.
"""

from __future__ import annotations

import numpy as np

from flopwright.kernels.kda.cost import CHUNK, kda
from flopwright.kernels.kda_gate.cost import kda_gate
from flopwright.kernels.linear.cost import linear
from flopwright.kernels.memory_bound import memory_bound
from flopwright.kernels.output_gate.cost import output_gate
from flopwright.kernels.rms_norm.cost import wide_bytes
from flopwright.kernels.short_conv.cost import short_conv
from flopwright.models.local import Local, add, gather, scatter
from flopwright.ops import Array, Collective, CostBuilder, OpKind, Phase
from flopwright.spec.model import KdaAttention


def delta_attention(cost: CostBuilder, spec: KdaAttention, hidden: int, local: Local) -> None:
    """Adds the rows of one KDA block; heads are cut over tp."""
    t, dtype = local.tokens, local.dtype
    heads = spec.num_heads / local.tp
    inner = heads * spec.head_dim
    gather(cost, "qkv", local, hidden)
    for name in ("q", "k", "v"):
        linear(cost, f"{name}_proj", rows=t, k=hidden, n=inner, dtype=dtype)
        cost.saved(f"{name}_proj.out", t * inner * local.width)
    linear(cost, "b_proj", rows=t, k=hidden, n=heads, dtype=dtype)
    if spec.output_gate_rank is None:
        linear(cost, "g_proj", rows=t, k=hidden, n=inner, dtype=dtype)
        cost.saved("g_proj.out", t * inner * local.width)
    else:
        _low_rank(cost, "g", hidden, spec.output_gate_rank, inner, local)
    _low_rank(cost, "f", hidden, spec.decay_rank, inner, local)
    _core(cost, spec, heads, local)
    output_gate(cost, "o_norm", rows=t, width=inner, dtype=dtype)
    cost.saved("o_norm.out", t * inner * local.width)
    linear(cost, "o_proj", rows=t, k=inner, n=hidden, dtype=dtype)
    scatter(cost, "o_proj", local, hidden)
    # Queries, keys, values, rates, decays and gate read the same state.
    add(cost, "input_grad_sum", Phase.BACKWARD_INPUT, t * hidden, local, 5)


def _low_rank(
    cost: CostBuilder, name: str, hidden: int, rank: int, inner: Array, local: Local
) -> None:
    """Adds two matrices in a row, the first whole on every rank, of its own tokens."""
    linear(cost, f"{name}_a_proj", rows=local.shard_tokens, k=hidden, n=rank, dtype=local.dtype)
    gather(cost, f"{name}_a_proj", local, rank, again=False)
    cost.saved(f"{name}_a_proj.out", local.tokens * rank * local.width)
    linear(cost, f"{name}_b_proj", rows=local.tokens, k=rank, n=inner, dtype=local.dtype)
    cost.saved(f"{name}_b_proj.out", local.tokens * inner * local.width)


def _core(cost: CostBuilder, spec: KdaAttention, heads: Array, local: Local) -> None:
    t, dtype, wide = local.tokens, local.dtype, wide_bytes(local.dtype)
    inner = heads * spec.head_dim
    for name in ("q", "k", "v"):
        short_conv(cost, f"attention.{name}_conv", rows=t, width=inner, dtype=dtype)
        cost.saved(f"attention.{name}", t * inner * local.width)
    kda_gate(cost, "attention.decay", rows=t, width=inner, dtype=dtype)
    cost.saved("attention.log_decays", t * inner * wide)
    for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT):
        memory_bound(
            cost, "attention.rates", phase, dtype=dtype, elements=t * heads,
            read_bytes=t * heads * wide, written_bytes=t * heads * wide,
        )  # fmt: skip
    cost.saved("attention.rates", t * heads * wide)
    sequences = np.asarray(local.shape.micro_batch_size, float)
    own = np.asarray(local.shape.seq_len, float) / local.cp
    kda(
        cost, "attention.delta_rule", sequences=sequences, seq_len=own, heads=heads,
        k_width=spec.head_dim, v_width=spec.head_dim, dtype=dtype,
    )  # fmt: skip
    _across_ranks(cost, spec, sequences * heads, own, local)
    cost.saved("attention.out", t * inner * local.width)


def _across_ranks(
    cost: CostBuilder, spec: KdaAttention, states: Array, own: Array, local: Local
) -> None:
    """Adds what context parallelism takes (arXiv 2607.24653, 5.1.2).

    Every rank makes the product of its transitions, a matrix as wide as the state, beside its
    state from zero; one gather of both, whatever the tokens, and the same for the gradients.
    """
    if not (local.cp > 1).any():
        return
    count, width = np.where(local.cp > 1, 1.0, 0.0), spec.head_dim
    pair = 2.0 * states * width**2 * wide_bytes(local.dtype)
    chunks = states * np.ceil(own / CHUNK)
    for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT):
        cost.comm(
            "state_context", Collective.ALL_GATHER, "cp", phase, nbytes=pair * local.cp,
            count=count,
        )  # fmt: skip
        cost.op(
            "attention.transitions", OpKind.ATTENTION, phase, dtype=local.dtype,
            flops=4.0 * chunks * CHUNK * width**2, m=own, n=CHUNK, k=width, batch=states,
            count=count, read_bytes=chunks * CHUNK * width * 2 * local.width,
            written_bytes=pair / 2, kernel="kda",
        )  # fmt: skip
