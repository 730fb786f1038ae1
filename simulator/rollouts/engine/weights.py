"""Every matrix of a served model: its role, shape and how GPUs share it. Bytes follow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flopwright.spec.model import GqaAttention, MlaAttention
from flopwright.spec.rollouts.engine_served import (
    EngineShape,
    KdaAttention,
    ServedLayers,
    ServedModel,
    ServedRole,
)

Split = Literal["tp", "experts", "none", "dense", "vocab"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix [rows, columns] of one layer, `stack` of them.

    Attributes:
        split: "tp": cut over the tp group; "experts": dealt to expert groups, each cut over
            its GPUs; "dense": cut over all GPUs of an instance without dp, else whole on each
            tp group's; "vocab": cut over the tp group; "none": on every GPU.
    """

    name: str
    role: ServedRole | None
    rows: int
    columns: int
    split: Split
    stack: int = 1

    @property
    def numel(self) -> int:
        """Number of weights."""
        return self.stack * self.rows * self.columns


def attention_matrices(group: ServedLayers, hidden: int) -> Iterator[Matrix]:
    """Yields the projections of one layer's attention."""
    attn = group.attention
    if isinstance(attn, MlaAttention):
        q_out = attn.num_heads * attn.qk_head_dim
        down = attn.kv_lora_rank + attn.qk_rope_head_dim
        if attn.q_lora_rank is None:
            yield Matrix("q_proj", "attention", q_out, hidden, "tp")
        else:
            down += attn.q_lora_rank
            yield Matrix("q_b_proj", "attention", q_out, attn.q_lora_rank, "tp")
        yield Matrix("down_proj", "attention", down, hidden, "none")
        up = attn.num_heads * (attn.qk_nope_head_dim + attn.v_head_dim)
        yield Matrix("kv_b_proj", "attention", up, attn.kv_lora_rank, "tp")
        if attn.indexer is not None and attn.q_lora_rank is not None:
            index = attn.indexer
            wide = index.num_heads * index.head_dim
            yield Matrix("indexer.wq_b", "attention", wide, attn.q_lora_rank, "none")
            down = index.head_dim + index.num_heads  # keys, and the heads' weights
            yield Matrix("indexer.wk", "attention", down, hidden, "none")
        out = attn.num_heads * attn.v_head_dim
    elif isinstance(attn, GqaAttention):
        out = attn.num_heads * attn.head_dim
        yield Matrix(
            "qkv_proj", "attention", out + 2 * attn.num_kv_heads * attn.head_dim, hidden, "tp"
        )
    else:
        out = attn.num_heads * attn.head_dim
        yield from _kda(attn, hidden, out)
    if group.output_gate:
        yield Matrix("gate_proj", "attention", out, hidden, "tp")
    yield Matrix("o_proj", "attention", hidden, out, "tp")


def _kda(attn: KdaAttention, hidden: int, out: int) -> Iterator[Matrix]:
    yield Matrix("qkv_proj", "attention", 3 * out + attn.num_heads, hidden, "tp")
    rank = attn.gate_rank or attn.head_dim
    yield Matrix("decay_down", "attention", rank, hidden, "none")
    yield Matrix("decay_up", "attention", out, rank, "tp")
    if attn.output_gate_rank is None:
        yield Matrix("output_gate", "attention", out, hidden, "tp")
    else:
        yield Matrix("output_gate_down", "attention", attn.output_gate_rank, hidden, "none")
        yield Matrix("output_gate_up", "attention", out, attn.output_gate_rank, "tp")


def feed_forward_matrices(group: ServedLayers, hidden: int) -> Iterator[Matrix]:
    """Yields the matrices of one layer behind its attention; gate and up are one."""
    if group.mlp is not None:
        wide = 2 if group.mlp.gated else 1
        size = group.mlp.intermediate_size
        yield Matrix("gate_up_proj", "mlp", wide * size, hidden, "dense")
        yield Matrix("down_proj", "mlp", hidden, size, "dense")
        return
    moe = group.moe
    assert moe is not None
    width, size = group.latent_size or hidden, moe.expert_intermediate_size
    yield Matrix("router", None, moe.num_experts, hidden, "none")
    if group.latent_size is not None:
        yield Matrix("latent_down", "attention", width, hidden, "none")
        yield Matrix("latent_up", "attention", hidden, width, "none")
    yield Matrix("experts.gate_up", "expert", 2 * size, width, "experts", moe.num_experts)
    yield Matrix("experts.down", "expert", width, size, "experts", moe.num_experts)
    if moe.num_shared_experts:
        shared = moe.num_shared_experts * size
        yield Matrix("shared.gate_up", "shared_expert", 2 * shared, hidden, "dense")
        yield Matrix("shared.down", "shared_expert", hidden, shared, "dense")


def end_matrices(model: ServedModel) -> Iterator[Matrix]:
    """Yields the embedding table and the head (none of its own where they are tied)."""
    yield Matrix("embedding", "embedding", model.vocab_size, model.hidden_size, "vocab")
    if not model.tied_embeddings:
        yield Matrix("head", "head", model.vocab_size, model.hidden_size, "vocab")


def all_matrices(model: ServedModel) -> Iterator[tuple[int, Matrix]]:
    """Yields (how many layers have it, matrix) over the whole model."""
    for group in model.layers:
        for matrix in attention_matrices(group, model.hidden_size):
            yield group.count, matrix
        for matrix in feed_forward_matrices(group, model.hidden_size):
            yield group.count, matrix
    for matrix in end_matrices(model):
        yield 1, matrix


def matrix_bytes(model: ServedModel, matrix: Matrix) -> int:
    """Returns the bytes of a matrix in the format of its role, scales included."""
    if matrix.role is None:
        return 2 * matrix.numel
    shape = (matrix.stack, matrix.rows, matrix.columns)
    return model.format_of(matrix.role).tensor_bytes(shape)


def num_params(model: ServedModel) -> int:
    """Returns all weights of the model."""
    return model.other_params + sum(n * m.numel for n, m in all_matrices(model))


def model_bytes(model: ServedModel) -> int:
    """Returns the bytes of all weights in their release formats."""
    return 2 * model.other_params + sum(n * matrix_bytes(model, m) for n, m in all_matrices(model))


def gpu_share(matrix: Matrix, shape: EngineShape) -> float:
    """Returns the share of a matrix that one GPU of the instance holds."""
    if matrix.split == "none":
        return 1.0
    if matrix.split == "experts":
        slots = math.ceil((matrix.stack + shape.redundant_experts) / shape.ep)
        return slots / matrix.stack / shape.expert_tp
    return 1.0 / shape.tp


def gpu_weight_bytes(model: ServedModel, shape: EngineShape) -> float:
    """Returns the bytes of weights on the fullest GPU of an instance."""
    shared = sum(n * matrix_bytes(model, m) * gpu_share(m, shape) for n, m in all_matrices(model))
    return shared + 2 * model.other_params
