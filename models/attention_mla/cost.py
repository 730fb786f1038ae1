"""What MLA costs and keeps. Its input, the normalised state, is kept by the layer."""

from __future__ import annotations

from flopwright.kernels.linear.cost import linear
from flopwright.kernels.output_gate.cost import output_gate
from flopwright.kernels.rope.cost import rope
from flopwright.models.core_attention import core_attention
from flopwright.models.local import Local, add, gather, scatter
from flopwright.models.norm.cost import norm
from flopwright.ops import CostBuilder, Phase
from flopwright.spec.model import MlaAttention

TAG_UP = "mla_up"


def queries(cost: CostBuilder, spec: MlaAttention, hidden: int, local: Local) -> None:
    """Adds what makes the queries of all heads."""
    out = spec.num_heads * spec.qk_head_dim / local.tp
    rank, dtype, t, shard = spec.q_lora_rank, local.dtype, local.tokens, local.shard_tokens
    if rank is None:
        gather(cost, "q_up", local, hidden)
        linear(cost, "q_proj", rows=t, k=hidden, n=out, dtype=dtype, tag=TAG_UP)
    else:
        linear(cost, "q_a_proj", rows=shard, k=hidden, n=rank, dtype=dtype)
        cost.saved("q_a_proj.out", shard * rank * local.width)
        norm(cost, "q_a_layernorm", rows=shard, width=rank, dtype=dtype)
        gather(cost, "q_a_layernorm", local, rank, again=False)
        cost.saved("q_a_layernorm.out", t * rank * local.width, tag="norm")
        linear(cost, "q_b_proj", rows=t, k=rank, n=out, dtype=dtype, tag=TAG_UP)
    if spec.rope is not None:
        rope(cost, "q_rope", elements=t * out, dtype=dtype, tag=TAG_UP)
    cost.saved("q", t * out * local.width, tag=TAG_UP)


def latents(cost: CostBuilder, spec: MlaAttention, hidden: int, local: Local) -> None:
    """Adds what makes the latent, normalised, and the rotary key before it is turned."""
    rank, dtype, shard = spec.kv_lora_rank, local.dtype, local.shard_tokens
    latent = rank + spec.qk_rope_head_dim
    linear(cost, "kv_a_proj_with_mqa", rows=shard, k=hidden, n=latent, dtype=dtype)
    cost.saved("kv_a_proj_with_mqa.out", shard * latent * local.width)
    norm(cost, "kv_a_layernorm", rows=shard, width=rank, dtype=dtype)
    gather(cost, "kv_a_layernorm", local, latent, again=False)


def over_all(cost: CostBuilder, spec: MlaAttention, local: Local) -> None:
    """Adds keys and values of all heads, and attention over them."""
    heads, rank, dtype = spec.num_heads / local.tp, spec.kv_lora_rank, local.dtype
    t, up = local.tokens, heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    cost.saved("kv_a_layernorm.out", t * rank * local.width, tag="norm")
    linear(cost, "kv_b_proj", rows=t, k=rank, n=up, dtype=dtype, tag=TAG_UP)
    keys, values = t * heads * spec.qk_head_dim, t * heads * spec.v_head_dim
    rope(cost, "kv_rope", elements=keys + values, dtype=dtype, tag=TAG_UP)
    cost.saved("k", keys * local.width, tag=TAG_UP)
    cost.saved("v", values * local.width, tag=TAG_UP)
    core_attention(
        cost,
        local,
        heads=heads,
        kv_heads=heads,
        qk_width=spec.qk_head_dim,
        v_width=spec.v_head_dim,
    )


def output(cost: CostBuilder, spec: MlaAttention, hidden: int, local: Local) -> None:
    """Adds the gate where there is one, the projection, and the sum of the branches' gradients."""
    heads, t = spec.num_heads / local.tp, local.tokens
    if spec.output_gate:
        values = heads * spec.v_head_dim
        gather(cost, "g_proj", local, hidden)
        linear(cost, "g_proj", rows=t, k=hidden, n=values, dtype=local.dtype)
        cost.saved("g_proj.out", t * values * local.width)
        output_gate(cost, "output_gate", rows=t, width=values, dtype=local.dtype)
        cost.saved("output_gate.out", t * values * local.width)
    linear(cost, "o_proj", rows=t, k=heads * spec.v_head_dim, n=hidden, dtype=local.dtype)
    scatter(cost, "o_proj", local, hidden)
    # Query, latent and gate branch read the same state.
    branches = local.shard_tokens * hidden
    times = 2 if spec.output_gate else 1
    add(cost, "input_grad_sum", Phase.BACKWARD_INPUT, branches, local, times)


def latent_attention(cost: CostBuilder, spec: MlaAttention, hidden: int, local: Local) -> None:
    """Adds the rows of one MLA block; TensorLife group "mla_up" is q, k and v."""
    queries(cost, spec, hidden, local)
    latents(cost, spec, hidden, local)
    over_all(cost, spec, local)
    output(cost, spec, hidden, local)
