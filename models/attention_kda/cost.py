"""What a KDA block costs and keeps. Its input, the normalised state, is kept by the layer.

Rows that core attention's recompute runs again begin with "attention": convolutions, decays
and the delta rule, from the projections' results.
"""

from __future__ import annotations

import numpy as np

from flopwright.kernels.kda.across_cost import carried_state
from flopwright.kernels.kda.cost import kda
from flopwright.kernels.kda_gate.cost import kda_gate
from flopwright.kernels.linear.cost import linear
from flopwright.kernels.memory_bound import memory_bound
from flopwright.kernels.output_gate.cost import output_gate
from flopwright.kernels.rms_norm.cost import wide_bytes
from flopwright.kernels.short_conv.cost import short_conv
from flopwright.models.local import Local, add, gather, scatter
from flopwright.ops import Array, Collective, CostBuilder, Phase
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
    sequences = np.asarray(local.shape.micro_batch_size, float)
    # Of a sequence a rank holds one run, or two where causal attention is to be even work.
    runs = np.where((local.cp > 1) & ~local.ulysses, 2.0, 1.0)
    run = np.asarray(local.shape.seq_len, float) / local.cp / runs
    _before_runs(cost, spec, sequences * runs, run, inner, local)
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
    width = spec.head_dim
    kda(
        cost, "attention.delta_rule", sequences=sequences * runs, seq_len=run, heads=heads,
        k_width=width, v_width=width, dtype=dtype,
    )  # fmt: skip
    if (local.cp > 1).any():
        carried_state(
            cost, "attention", sequences=sequences, runs=runs, ranks=local.cp, seq_len=run,
            heads=heads, k_width=width, v_width=width, dtype=dtype,
        )  # fmt: skip
        _states(cost, spec, sequences * runs * heads, local)
    cost.saved("attention.out", t * inner * local.width)


def _before_runs(
    cost: CostBuilder, spec: KdaAttention, runs: Array, run: Array, inner: Array, local: Local
) -> None:
    """Adds what the convolutions read of the run before, of three projections in one message."""
    taps = spec.conv_kernel - 1
    if not taps or not (local.cp > 1).any():
        return
    count = np.where(local.cp > 1, 1.0, 0.0)
    position = runs * 3.0 * inner * local.width
    for phase, positions in ((Phase.FORWARD, np.minimum(taps, run)), (Phase.BACKWARD_INPUT, taps)):
        cost.comm(
            "conv_context", Collective.ALL_GATHER, "cp", phase,
            nbytes=position * positions * local.cp, count=count,
        )  # fmt: skip
    cost.saved("attention.before_runs", position * taps * count)


def _states(cost: CostBuilder, spec: KdaAttention, states: Array, local: Local) -> None:
    """Adds what carries the state over the ranks of a sequence (arXiv 2607.24653, 5.1.2).

    One gather of each run's state from zero and of the product of its transitions, a matrix as
    wide, whatever the tokens; backward of the gradient that the run asks for, and the product.
    The state before a run and its product are kept.
    """
    count = np.where(local.cp > 1, 1.0, 0.0)
    pair = 2.0 * states * spec.head_dim**2 * wide_bytes(local.dtype)
    for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT):
        cost.comm(
            "state_context", Collective.ALL_GATHER, "cp", phase, nbytes=pair * local.cp,
            count=count,
        )  # fmt: skip
    cost.saved("attention.carried", pair * count)
