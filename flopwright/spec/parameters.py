"""Every parameter of a model by name, shape and role: the one place for this fact.

The modules build exactly these tensors (a test compares them on the meta device), memory
is priced from them, and `plan/sharding.py` says which rank owns which part. Names follow
the DeepSeek-V3/Llama layout of transformers 5, where a layer's experts are stacked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flopwright.spec.model import GqaAttention, MlaAttention, ModelSpec

Role = Literal[
    "embedding",
    "position",
    "attention",
    "mlp",
    "expert",
    "shared_expert",
    "router",
    "norm",
    "head",
    "mtp",
]

EMBEDDING_LAYER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamTensor:
    """One named tensor.

    Attributes:
        layer: 0-based layer; -1 for the embeddings, num_layers for the final norm and head.
        role: what it does; experts are stacked along dimension 0.
        trainable: False for the router's selection bias, which no gradient reaches.
        tied: True for a head that shares the embedding's storage (counts 0 parameters).
    """

    name: str
    shape: tuple[int, ...]
    layer: int
    role: Role
    trainable: bool = True
    tied: bool = False

    @property
    def numel(self) -> int:
        """Number of elements (0 where the storage belongs to another tensor)."""
        return 0 if self.tied else math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether Muon would orthogonalise it: hidden matrices, not tables, heads or vectors."""
        return len(self.shape) >= 2 and self.role in {
            "attention",
            "mlp",
            "expert",
            "shared_expert",
            "router",
            "mtp",
        }


def _attention(spec: ModelSpec, layer: int) -> Iterator[ParamTensor]:
    prefix, h, attn = f"model.layers.{layer}.self_attn", spec.hidden_size, spec.attention

    def tensor(name: str, *shape: int, role: Role = "attention") -> ParamTensor:
        return ParamTensor(name=f"{prefix}.{name}", shape=shape, layer=layer, role=role)

    if isinstance(attn, MlaAttention):
        q_out = attn.num_heads * attn.qk_head_dim
        if attn.q_lora_rank is None:
            yield tensor("q_proj.weight", q_out, h)
        else:
            yield tensor("q_a_proj.weight", attn.q_lora_rank, h)
            yield tensor("q_a_layernorm.weight", attn.q_lora_rank, role="norm")
            yield tensor("q_b_proj.weight", q_out, attn.q_lora_rank)
        yield tensor("kv_a_proj_with_mqa.weight", attn.kv_lora_rank + attn.qk_rope_head_dim, h)
        yield tensor("kv_a_layernorm.weight", attn.kv_lora_rank, role="norm")
        yield tensor(
            "kv_b_proj.weight",
            attn.num_heads * (attn.qk_nope_head_dim + attn.v_head_dim),
            attn.kv_lora_rank,
        )
        yield tensor("o_proj.weight", h, attn.num_heads * attn.v_head_dim)
        return
    assert isinstance(attn, GqaAttention)
    q_out, kv_out = attn.num_heads * attn.head_dim, attn.num_kv_heads * attn.head_dim
    for name, out in (("q_proj", q_out), ("k_proj", kv_out), ("v_proj", kv_out)):
        yield tensor(f"{name}.weight", out, h)
        if attn.bias:
            yield tensor(f"{name}.bias", out)
    yield tensor("o_proj.weight", h, q_out)
    if attn.o_bias:
        yield tensor("o_proj.bias", h)
    if attn.qk_norm:
        yield tensor("q_norm.weight", attn.head_dim, role="norm")
        yield tensor("k_norm.weight", attn.head_dim, role="norm")


def _feed_forward(spec: ModelSpec, layer: int) -> Iterator[ParamTensor]:
    prefix, h = f"model.layers.{layer}.mlp", spec.hidden_size

    def dense(path: str, width: int, role: Role, bias: bool) -> Iterator[ParamTensor]:
        up = ("gate_proj", "up_proj") if spec.mlp.kind == "swiglu" else ("up_proj",)
        for name, shape in (*((n, (width, h)) for n in up), ("down_proj", (h, width))):
            yield ParamTensor(name=f"{path}.{name}.weight", shape=shape, layer=layer, role=role)
            if bias:
                yield ParamTensor(
                    name=f"{path}.{name}.bias", shape=shape[:1], layer=layer, role=role
                )

    if not spec.is_moe_layer(layer):
        yield from dense(prefix, spec.mlp.intermediate_size, "mlp", spec.mlp.bias)
        return
    moe = spec.moe
    assert moe is not None
    yield ParamTensor(
        name=f"{prefix}.gate.weight", shape=(moe.num_experts, h), layer=layer, role="router"
    )
    if moe.router == "sigmoid_noaux_tc":
        yield ParamTensor(
            name=f"{prefix}.gate.e_score_correction_bias",
            shape=(moe.num_experts,),
            layer=layer,
            role="router",
            trainable=False,
        )
    m = moe.expert_intermediate_size
    yield ParamTensor(
        name=f"{prefix}.experts.gate_up_proj",
        shape=(moe.num_experts, 2 * m, h),
        layer=layer,
        role="expert",
    )
    yield ParamTensor(
        name=f"{prefix}.experts.down_proj",
        shape=(moe.num_experts, h, m),
        layer=layer,
        role="expert",
    )
    if moe.num_shared_experts:
        width = moe.num_shared_experts * m
        yield from dense(f"{prefix}.shared_experts", width, "shared_expert", False)


def _norm(spec: ModelSpec, name: str, layer: int) -> Iterator[ParamTensor]:
    leaves = ("weight", "bias") if spec.norm == "layer_norm" else ("weight",)
    for leaf in leaves:
        yield ParamTensor(
            name=f"{name}.{leaf}", shape=(spec.hidden_size,), layer=layer, role="norm"
        )


def layer_parameters(spec: ModelSpec, layer: int) -> Iterator[ParamTensor]:
    """Yields the tensors of one layer.

    Args:
        layer: -1 for the embeddings, num_layers for the final norm and the head, above that
            one of the mtp_layers modules (arXiv 2412.19437, 2.2).
    """
    h, v = spec.hidden_size, spec.vocab_size
    if layer == EMBEDDING_LAYER:
        yield ParamTensor(
            name="model.embed_tokens.weight", shape=(v, h), layer=layer, role="embedding"
        )
        if spec.positions == "learned":
            yield ParamTensor(
                name="model.embed_positions.weight",
                shape=(spec.max_seq_len, h),
                layer=layer,
                role="position",
            )
        return
    if layer == spec.num_layers:
        yield from _norm(spec, "model.norm", layer)
        yield ParamTensor(
            name="lm_head.weight",
            shape=(v, h),
            layer=layer,
            role="head",
            tied=spec.tied_embeddings,
        )
        return
    if layer > spec.num_layers:
        yield from _norm(spec, f"model.layers.{layer}.hnorm", layer)
        yield from _norm(spec, f"model.layers.{layer}.enorm", layer)
        yield ParamTensor(
            name=f"model.layers.{layer}.eh_proj.weight", shape=(h, 2 * h), layer=layer, role="mtp"
        )
    yield from _norm(spec, f"model.layers.{layer}.input_layernorm", layer)
    yield from _attention(spec, layer)
    yield from _norm(spec, f"model.layers.{layer}.post_attention_layernorm", layer)
    yield from _feed_forward(spec, layer)


def parameters(spec: ModelSpec) -> tuple[ParamTensor, ...]:
    """Returns every tensor of the model, embeddings first, head last."""
    return tuple(
        p
        for layer in range(EMBEDDING_LAYER, spec.num_layers + 1 + spec.mtp_layers)
        for p in layer_parameters(spec, layer)
    )


def num_params(spec: ModelSpec) -> int:
    """Returns the number of weights, the router's selection bias included."""
    return sum(p.numel for p in parameters(spec))


def num_active_params(spec: ModelSpec, *, input_embedding: bool = False, head: bool = True) -> int:
    """Returns the weights that touch one token.

    Args:
        input_embedding: count the input embedding table (a lookup, not a product).
        head: count the output head, once more for each multi-token-prediction module.
    """
    total = 0
    for p in parameters(spec):
        if p.role in {"embedding", "position"} and not input_embedding:
            continue
        if p.role == "head" and not head:
            continue
        if p.role == "expert":
            assert spec.moe is not None
            total += p.numel * spec.moe.top_k // spec.moe.num_experts
        elif p.role == "head":
            total += math.prod(p.shape) * (1 + spec.mtp_layers)
        else:
            total += p.numel
    return total
