"""Operator rows of one forward pass on one GPU of an engine: the tables that training prices.

The candidate axis holds the loads: a step of 1 attempt, of 2, of 4, ... is one column each.
Attention over the cache and the exchanges are priced beside them (`price.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from flopwright.ops import Array, BlockCost, CostBuilder, OpKind, Phase
from flopwright.simulator.rollouts.engine.curves import product_dtype
from flopwright.simulator.rollouts.engine.weights import (
    Matrix,
    attention_matrices,
    feed_forward_matrices,
)
from flopwright.spec.cluster import GpuSpec
from flopwright.spec.model import GqaAttention, MlaAttention
from flopwright.spec.rollouts.engine_served import (
    CACHE_BYTES,
    EngineShape,
    KdaAttention,
    ServedLayers,
    ServedModel,
)

_ACTIVATION = 2  # bytes: bf16 between operators
# Slices of experts narrower than the tables' reach the efficiency of their narrowest.
_NARROWEST = 256.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one forward pass holds, of one tp group; arrays are columns of loads.

    Attributes:
        attempts: sequences that decode.
        context_tokens: context of all of them together.
        step_tokens: tokens each of them runs through the model (1, or 1 + drafts).
        prompts: sequences that prefill in this pass.
        prompt_tokens: their new tokens together.
        prompt_pairs: pairs of a new token with one it sees, together: t p + t^2 / 2 each.
        prompt_context: tokens of cache that they read: cached and new.
    """

    attempts: Array
    context_tokens: Array
    step_tokens: float = 1.0
    prompts: Array
    prompt_tokens: Array
    prompt_pairs: Array
    prompt_context: Array

    @property
    def rows(self) -> Array:
        """Tokens that go through every product."""
        return np.asarray(self.attempts * self.step_tokens + self.prompt_tokens)

    def scaled(self, share: float) -> Load:
        """Returns a part of the load: that share of everything in it."""
        return replace(
            self,
            attempts=self.attempts * share,
            context_tokens=self.context_tokens * share,
            prompts=self.prompts * share,
            prompt_tokens=self.prompt_tokens * share,
            prompt_pairs=self.prompt_pairs * share,
            prompt_context=self.prompt_context * share,
        )

    @property
    def size(self) -> int:
        """Columns."""
        return int(self.attempts.shape[0])


def load(
    attempts: ArrayLike,
    context_tokens: ArrayLike = 0.0,
    *,
    step_tokens: float = 1.0,
    prompts: ArrayLike = 0.0,
    prompt_tokens: ArrayLike = 0.0,
    prompt_pairs: ArrayLike = 0.0,
    prompt_context: ArrayLike | None = None,
) -> Load:
    """Returns a load whose columns are all inputs broadcast to one length."""
    seen = prompt_tokens if prompt_context is None else prompt_context
    columns = (attempts, context_tokens, prompts, prompt_tokens, prompt_pairs, seen)
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(c, float)) for c in columns))
    return Load(
        attempts=arrays[0],
        context_tokens=arrays[1],
        step_tokens=step_tokens,
        prompts=arrays[2],
        prompt_tokens=arrays[3],
        prompt_pairs=arrays[4],
        prompt_context=arrays[5],
    )


@dataclass(frozen=True, slots=True)
class _Pass:
    cost: CostBuilder
    model: ServedModel
    shape: EngineShape
    gpu: GpuSpec
    loads: Load

    def product(self, name: str, matrix: Matrix, rows: Array, tp: int) -> None:
        """Adds x[rows, columns] @ w^T, the weight cut tp ways along the side `split` cuts."""
        weights = self.model.format_of(matrix.role) if matrix.role else None
        dtype = product_dtype(weights, self.gpu) if weights else "bf16"
        bits = weights.bits_per_weight if weights else 16.0
        inward = name.endswith(("o_proj", "down_proj", "shared.down"))
        k = matrix.columns / (tp if inward else 1)
        n = matrix.rows / (1 if inward else tp)
        self.cost.op(
            name, OpKind.GEMM, Phase.FORWARD, dtype=dtype, flops=2 * rows * k * n, m=rows, k=k,
            n=n, read_bytes=k * n * bits / 8 + rows * k * _ACTIVATION,
            written_bytes=rows * n * _ACTIVATION, count=np.where(rows > 0, 1.0, 0.0),
        )  # fmt: skip

    def moved(self, name: str, values: ArrayLike, count: ArrayLike = 1.0) -> None:
        """Adds an operator whose time is the values it reads and writes."""
        both = np.asarray(values, float) * _ACTIVATION
        self.cost.op(
            name, OpKind.MEMORY_BOUND, Phase.FORWARD, dtype="bf16", m=np.asarray(values, float),
            read_bytes=both, count=np.where(both > 0, count, 0.0),
        )  # fmt: skip


def layer_rows(
    model: ServedModel, group: ServedLayers, shape: EngineShape, gpu: GpuSpec, loads: Load,
    skew: float = 1.0,
) -> BlockCost:  # fmt: skip
    """Returns the rows of one layer of a group, all but attention itself and the links.

    Args:
        skew: rows of the busiest GPU's experts over the mean.
    """
    at = _Pass(CostBuilder(), model, shape, gpu, loads)
    rows, hidden = loads.rows, model.hidden_size
    at.moved("input_layernorm", 4 * rows * hidden)  # the residual sum is fused into the norm
    _attention(at, group)
    at.moved("post_attention_layernorm", 4 * rows * hidden)
    _feed_forward(at, group, skew)
    return at.cost.build(loads.size)


def _attention(at: _Pass, group: ServedLayers) -> None:
    attn, tp, rows = group.attention, at.shape.tp, at.loads.rows
    for matrix in attention_matrices(group, at.model.hidden_size):
        if matrix.name == "kv_b_proj":  # decoding absorbs it into query and output
            at.product(f"self_attn.{matrix.name}", matrix, at.loads.prompt_tokens, tp)
        else:
            cut = tp if matrix.split == "tp" else 1
            at.product(f"self_attn.{matrix.name}", matrix, rows, cut)
    if isinstance(attn, MlaAttention):
        _absorbed(at, attn)
        at.moved("self_attn.latent_norm", 2 * rows * (attn.kv_lora_rank + (attn.q_lora_rank or 0)))
        heads, width = attn.num_heads / tp, attn.qk_rope_head_dim
        at.moved("self_attn.rope", 2 * rows * (heads + 1) * width)
    elif isinstance(attn, GqaAttention):
        heads = attn.num_heads / tp + 2 * max(attn.num_kv_heads / tp, 1.0)
        at.moved("self_attn.rope", 2 * rows * heads * attn.head_dim)
    else:
        _delta(at, attn)


def _absorbed(at: _Pass, attn: MlaAttention) -> None:
    """Adds the products of queries and of outputs with the latent's up-projection, by head."""
    rows = at.loads.attempts * at.loads.step_tokens
    heads = attn.num_heads / at.shape.tp
    for name, width in (("absorb_q", attn.qk_nope_head_dim), ("absorb_v", attn.v_head_dim)):
        k, n = float(width), float(attn.kv_lora_rank)
        at.cost.op(
            f"self_attn.{name}", OpKind.GEMM, Phase.FORWARD, dtype="bf16", m=rows, k=k * heads,
            n=n, flops=2 * rows * heads * k * n, count=np.where(rows > 0, 1.0, 0.0),
            read_bytes=heads * (k * n + rows * k) * _ACTIVATION,
            written_bytes=heads * rows * n * _ACTIVATION,
        )  # fmt: skip


def _delta(at: _Pass, attn: KdaAttention) -> None:
    """Adds convolution, gates and the read and write of every sequence's state."""
    heads, rows = attn.num_heads / at.shape.tp, at.loads.rows
    at.moved("self_attn.conv", 2 * rows * 3 * heads * attn.head_dim)
    at.moved("self_attn.gates", 3 * rows * heads * attn.head_dim)
    state = CACHE_BYTES[at.model.state_dtype] / _ACTIVATION
    sequences = at.loads.attempts + at.loads.prompts
    at.moved("self_attn.state", 2 * sequences * heads * attn.head_dim**2 * state)
    tokens = at.loads.prompt_tokens
    chunk = 64.0
    flops = tokens * heads * attn.head_dim * (6 * attn.head_dim + 3 * chunk)
    at.cost.op(
        "self_attn.kda", OpKind.ATTENTION, Phase.FORWARD, dtype="bf16", kernel="kda", flops=flops,
        m=tokens, n=tokens, k=attn.head_dim, batch=heads, count=np.where(tokens > 0, 1.0, 0.0),
    )  # fmt: skip


def _feed_forward(at: _Pass, group: ServedLayers, skew: float) -> None:
    rows, cut = at.loads.rows, at.shape.tp
    for matrix in feed_forward_matrices(group, at.model.hidden_size):
        if matrix.split != "experts":
            at.product(f"mlp.{matrix.name}", matrix, rows, cut if matrix.split == "dense" else 1)
    if group.mlp is not None:
        at.moved("mlp.act", 3 * rows * group.mlp.intermediate_size / cut)
        return
    assert group.moe is not None
    if group.moe.num_shared_experts:
        width = group.moe.num_shared_experts * group.moe.expert_intermediate_size / cut
        at.moved("mlp.shared.act", 3 * rows * width)
    _experts(at, group, skew)


def touched_experts(slots: ArrayLike, num_experts: int, top_k: int, tokens: ArrayLike) -> Array:
    """Returns how many of a GPU's expert slots some token wants: slots (1 - (1 - k/E)^tokens)."""
    missed = (1.0 - top_k / num_experts) ** np.asarray(tokens, float)
    return np.asarray(np.asarray(slots, float) * (1.0 - missed))


def _experts(at: _Pass, group: ServedLayers, skew: float) -> None:
    """Adds one row for permute, both products and combine of the routed experts of a GPU."""
    moe, shape = group.moe, at.shape
    assert moe is not None
    width = float(group.latent_size or at.model.hidden_size)
    inner = moe.expert_intermediate_size / shape.expert_tp
    tokens = at.loads.rows * shape.dp
    slots = (moe.num_experts + shape.redundant_experts) / shape.ep
    touched = touched_experts(slots, moe.num_experts, moe.top_k, tokens)
    taken = tokens * moe.top_k / shape.ep * skew
    form = at.model.format_of("expert")
    m = taken / np.maximum(touched, 1e-9)
    at.cost.op(
        "mlp.experts", OpKind.GROUPED_GEMM, Phase.FORWARD, dtype=product_dtype(form, at.gpu),
        m=m, k=width, n=max(inner, _NARROWEST), batch=touched, flops=6 * taken * width * inner,
        read_bytes=touched * 3 * width * inner * form.bits_per_weight / 8,
        written_bytes=taken * (2 * width + 3 * inner) * _ACTIVATION,
        count=np.where(tokens > 0, 1.0, 0.0),
    )  # fmt: skip


def end_rows(
    model: ServedModel, shape: EngineShape, gpu: GpuSpec, loads: Load, logit_bytes: float = 8.0
) -> BlockCost:
    """Returns the rows outside of layers: embedding, last norm, logits, sampling.

    Logits are made of the tokens that are sampled: all of decoding, the last of a prompt.

    Args:
        logit_bytes: bytes that sampling moves for every logit.
    """
    at = _Pass(CostBuilder(), model, shape, gpu, loads)
    rows, hidden = loads.rows, model.hidden_size
    sampled = loads.attempts * loads.step_tokens + loads.prompts
    at.moved("embedding", 2 * rows * hidden)
    at.moved("norm", 2 * rows * hidden)
    head = Matrix("head", "head", model.vocab_size, hidden, "vocab")
    at.product("head", head, sampled, shape.tp)
    at.moved("sampling", logit_bytes / _ACTIVATION * sampled * model.vocab_size)
    return at.cost.build(loads.size)
