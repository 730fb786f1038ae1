"""Every parameter of a model by name, shape and role: the one place for this fact.

The modules build exactly these tensors (a test compares them on the meta device), memory
is priced from them, and `plan/sharding.py` says which rank owns which part. Names follow
the DeepSeek-V3/Llama layout of transformers 5, where a layer's experts are stacked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from flopwright.spec.model import GqaAttention, KdaAttention, MlaAttention, ModelSpec

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
    "latent",
    "channel",
]

EMBEDDING_LAYER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamTensor:
    """One named tensor.

    Attributes:
        layer: 0-based layer; -1 for the embeddings, num_layers for the final norm and head.
        role: what it does; experts are stacked along dimension 0. "latent" is what leads into
            and out of the width that experts work in, "channel" what attention has a channel
            or head (short convolutions, decay rates).
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
    def is_bias(self) -> bool:
        """Whether it is added, not multiplied; those of experts are stacked as well."""
        return self.name.endswith("bias")

    @property
    def is_matrix(self) -> bool:
        """Whether Muon would orthogonalise it: hidden matrices, not tables, heads or vectors."""
        return (
            len(self.shape) >= 2
            and not self.is_bias
            and self.role
            in {
                "attention",
                "mlp",
                "expert",
                "shared_expert",
                "router",
                "mtp",
                "latent",
            }
        )


class _Named:
    """Makes the tensors under one prefix of one layer."""

    def __init__(self, prefix: str, layer: int, role: Role) -> None:
        self._prefix, self._layer, self._role = prefix, layer, role

    def __call__(self, name: str, *shape: int, role: Role | None = None) -> ParamTensor:
        return ParamTensor(
            name=f"{self._prefix}.{name}", shape=shape, layer=self._layer, role=role or self._role
        )


def _attention(spec: ModelSpec, layer: int) -> Iterator[ParamTensor]:
    tensor = _Named(f"model.layers.{layer}.self_attn", layer, "attention")
    attn, h = spec.attention_of(layer), spec.hidden_size
    if isinstance(attn, MlaAttention):
        yield from _latent_attention(tensor, attn, h)
    elif isinstance(attn, KdaAttention):
        yield from _linear_attention(tensor, attn, h)
    else:
        yield from _grouped_attention(tensor, attn, h)


def _latent_attention(tensor: _Named, attn: MlaAttention, h: int) -> Iterator[ParamTensor]:
    q_out, v_out = attn.num_heads * attn.qk_head_dim, attn.num_heads * attn.v_head_dim
    if attn.q_lora_rank is None:
        yield tensor("q_proj.weight", q_out, h)
    else:
        yield tensor("q_a_proj.weight", attn.q_lora_rank, h)
        yield tensor("q_a_layernorm.weight", attn.q_lora_rank, role="norm")
        yield tensor("q_b_proj.weight", q_out, attn.q_lora_rank)
    yield tensor("kv_a_proj_with_mqa.weight", attn.kv_lora_rank + attn.qk_rope_head_dim, h)
    yield tensor("kv_a_layernorm.weight", attn.kv_lora_rank, role="norm")
    up = attn.num_heads * (attn.qk_nope_head_dim + attn.v_head_dim)
    yield tensor("kv_b_proj.weight", up, attn.kv_lora_rank)
    if attn.output_gate:
        yield tensor("g_proj.weight", v_out, h)
    yield tensor("o_proj.weight", h, v_out)
    index = attn.indexer
    if index is not None:  # named as in the releases of DeepSeek-V3.2
        assert attn.q_lora_rank is not None
        yield tensor("indexer.wq_b.weight", index.num_heads * index.head_dim, attn.q_lora_rank)
        yield tensor("indexer.wk.weight", index.head_dim, h)
        for leaf in ("weight", "bias"):
            yield tensor(f"indexer.k_norm.{leaf}", index.head_dim, role="norm")
        yield tensor("indexer.weights_proj.weight", index.num_heads, h)


def _linear_attention(tensor: _Named, attn: KdaAttention, h: int) -> Iterator[ParamTensor]:
    """Yields a KDA block's tensors, named as in the releases of Kimi Linear and Kimi K3."""
    inner, rank = attn.inner_size, attn.decay_rank
    for name in ("q", "k", "v"):
        yield tensor(f"{name}_proj.weight", inner, h)
    for name in ("q", "k", "v"):
        yield tensor(f"{name}_conv1d.weight", inner, 1, attn.conv_kernel, role="channel")
    yield tensor("A_log", attn.num_heads, role="channel")
    yield tensor("dt_bias", inner, role="channel")
    yield tensor("f_a_proj.weight", rank, h)
    yield tensor("f_b_proj.weight", inner, rank)
    yield tensor("b_proj.weight", attn.num_heads, h)
    if attn.output_gate_rank is None:
        yield tensor("g_proj.weight", inner, h)
    else:
        yield tensor("g_a_proj.weight", attn.output_gate_rank, h)
        yield tensor("g_b_proj.weight", inner, attn.output_gate_rank)
    yield tensor("o_norm.weight", attn.head_dim, role="norm")
    yield tensor("o_proj.weight", h, inner)


def _grouped_attention(tensor: _Named, attn: GqaAttention, h: int) -> Iterator[ParamTensor]:
    q_out, kv_out = attn.num_heads * attn.head_dim, attn.num_kv_heads * attn.head_dim
    for name, out in (("q_proj", q_out), ("k_proj", kv_out), ("v_proj", kv_out)):
        yield tensor(f"{name}.weight", out, h)
        if attn.bias:
            yield tensor(f"{name}.bias", out)
    if attn.sinks:
        yield tensor("sinks", attn.num_heads, role="channel")
    yield tensor("o_proj.weight", h, q_out)
    if attn.o_bias:
        yield tensor("o_proj.bias", h)
    if attn.qk_norm:
        whole = attn.qk_norm_whole
        yield tensor("q_norm.weight", q_out if whole else attn.head_dim, role="norm")
        yield tensor("k_norm.weight", kv_out if whole else attn.head_dim, role="norm")


def _dense(
    tensor: _Named, path: str, spec: ModelSpec, width: int, role: Role, bias: bool
) -> Iterator[ParamTensor]:
    h = spec.hidden_size
    up = ("gate_proj", "up_proj") if spec.mlp.gated else ("up_proj",)
    for name, shape in (*((n, (width, h)) for n in up), ("down_proj", (h, width))):
        yield tensor(f"{path}{name}.weight", *shape, role=role)
        if bias:
            yield tensor(f"{path}{name}.bias", shape[0], role=role)


def _feed_forward(spec: ModelSpec, layer: int) -> Iterator[ParamTensor]:
    tensor = _Named(f"model.layers.{layer}.mlp", layer, "mlp")
    if not spec.is_moe_layer(layer):
        yield from _dense(tensor, "", spec, spec.mlp.intermediate_size, "mlp", spec.mlp.bias)
        return
    moe, h = spec.moe, spec.hidden_size
    assert moe is not None
    yield tensor("gate.weight", moe.num_experts, h, role="router")
    if moe.bias:
        yield tensor("gate.bias", moe.num_experts, role="router")
    if moe.router == "sigmoid_noaux_tc":
        bias = tensor("gate.e_score_correction_bias", moe.num_experts, role="router")
        yield replace(bias, trainable=False)
    width, m = moe.latent_size or h, moe.expert_intermediate_size
    if moe.latent_size is not None:
        yield tensor("routed_expert_down_proj.weight", width, h, role="latent")
        yield tensor("routed_expert_norm.weight", width, role="norm")
        yield tensor("routed_expert_up_proj.weight", h, width, role="latent")
    yield tensor("experts.gate_up_proj", moe.num_experts, 2 * m, width, role="expert")
    yield tensor("experts.down_proj", moe.num_experts, width, m, role="expert")
    if moe.bias:
        yield tensor("experts.gate_up_proj_bias", moe.num_experts, 2 * m, role="expert")
        yield tensor("experts.down_proj_bias", moe.num_experts, width, role="expert")
    if moe.num_shared_experts:
        shared = moe.num_shared_experts * m
        yield from _dense(tensor, "shared_experts.", spec, shared, "shared_expert", False)


def _residual_mixture(spec: ModelSpec, name: str, layer: int) -> Iterator[ParamTensor]:
    """Yields the norm and the query of one mixture of attention residuals."""
    if spec.attn_res_block is None:
        return
    for leaf, shape in (("norm", (spec.hidden_size,)), ("proj", (1, spec.hidden_size))):
        yield ParamTensor(name=f"{name}_{leaf}.weight", shape=shape, layer=layer, role="norm")


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
        yield from _residual_mixture(spec, "model.output_attn_res", layer)
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
    yield from _residual_mixture(spec, f"model.layers.{layer}.self_attention_res", layer)
    yield from _norm(spec, f"model.layers.{layer}.input_layernorm", layer)
    yield from _attention(spec, layer)
    yield from _residual_mixture(spec, f"model.layers.{layer}.mlp_res", layer)
    yield from _norm(spec, f"model.layers.{layer}.post_attention_layernorm", layer)
    yield from _feed_forward(spec, layer)
    if layer > spec.num_layers:
        yield from _norm(spec, f"model.layers.{layer}.shared_head.norm", layer)


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
