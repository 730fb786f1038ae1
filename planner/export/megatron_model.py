"""Megatron-LM's arguments that say a model: widths, attention, positions, experts.

Flag names and their meaning: Megatron-LM's `megatron/training/arguments.py` and Megatron
Core's `TransformerConfig` (0.16).
"""

from __future__ import annotations

from collections.abc import Iterator

from flopwright.spec.model import MlaAttention, ModelSpec, Moe, YarnScaling

Flag = tuple[str, ...]


def model_flags(model: ModelSpec) -> Iterator[Flag]:
    """Yields the flags that say the model, each with its values."""
    yield "--num-layers", str(model.num_layers)
    yield "--hidden-size", str(model.hidden_size)
    yield "--ffn-hidden-size", str(model.mlp.intermediate_size)
    yield "--num-attention-heads", str(model.attention.num_heads)
    yield "--max-position-embeddings", str(model.max_seq_len)
    yield "--vocab-size", str(model.vocab_size)
    yield "--normalization", "RMSNorm" if model.norm == "rms_norm" else "LayerNorm"
    yield "--norm-epsilon", f"{model.norm_eps:g}"
    if model.mlp.gated:
        yield ("--swiglu",)
    if not model.mlp.bias:
        yield ("--disable-bias-linear",)
    if not model.tied_embeddings:
        yield ("--untie-embeddings-and-output-weights",)
    yield "--attention-dropout", "0.0"
    yield "--hidden-dropout", "0.0"
    yield from _attention_flags(model)
    if model.mtp_layers:
        yield "--mtp-num-layers", str(model.mtp_layers)
        yield "--mtp-loss-scaling-factor", str(model.mtp_loss_weight)
    if model.moe is not None:
        yield from _moe_flags(model, model.moe)


def _attention_flags(model: ModelSpec) -> Iterator[Flag]:
    attention = model.attention
    if isinstance(attention, MlaAttention):
        yield ("--multi-latent-attention",)
        if attention.q_lora_rank is not None:
            yield "--q-lora-rank", str(attention.q_lora_rank)
        yield "--kv-lora-rank", str(attention.kv_lora_rank)
        yield "--qk-head-dim", str(attention.qk_nope_head_dim)
        yield "--qk-pos-emb-head-dim", str(attention.qk_rope_head_dim)
        yield "--v-head-dim", str(attention.v_head_dim)
        yield from _mla_rope_flags(attention)
        return
    yield "--kv-channels", str(attention.head_dim)
    if attention.num_kv_heads != attention.num_heads:
        yield ("--group-query-attention",)
        yield "--num-query-groups", str(attention.num_kv_heads)
    if attention.qk_norm:
        yield ("--qk-layernorm",)
    if attention.bias:
        yield ("--add-qkv-bias",)
    if attention.sliding_window is not None:
        yield "--window-size", f"{attention.sliding_window - 1},0"
    if model.positions == "learned" or attention.rope is None:
        yield "--position-embedding-type", "learned_absolute"
        return
    yield "--position-embedding-type", "rope"
    yield "--rotary-base", f"{attention.rope.theta:.0f}"
    if attention.rope.fraction != 1:
        yield "--rotary-percent", f"{attention.rope.fraction:g}"
    if attention.rope.scaling is not None and attention.rope.scaling.kind == "llama3":
        yield ("--use-rope-scaling",)
        yield "--rope-scaling-factor", f"{attention.rope.scaling.factor:g}"


def _mla_rope_flags(attention: MlaAttention) -> Iterator[Flag]:
    rope = attention.rope
    assert rope is not None, "refused before (megatron.py)"
    yield "--position-embedding-type", "rope"
    yield "--rotary-base", f"{rope.theta:.0f}"
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling):
        yield "--rope-type", "rope"
        return
    yield "--rope-type", "yarn"
    yield "--rotary-scaling-factor", f"{scaling.factor:g}"
    yield "--original-max-position-embeddings", str(scaling.original_max_seq_len)
    yield "--beta-fast", f"{scaling.beta_fast:g}"
    yield "--beta-slow", f"{scaling.beta_slow:g}"
    yield "--mscale", f"{scaling.mscale:g}"
    yield "--mscale-all-dim", f"{scaling.mscale_all_dim:g}"


def _moe_flags(model: ModelSpec, moe: Moe) -> Iterator[Flag]:
    yield "--num-experts", str(moe.num_experts)
    yield "--moe-router-topk", str(moe.top_k)
    yield "--moe-ffn-hidden-size", str(moe.expert_intermediate_size)
    if moe.num_shared_experts:
        shared = moe.num_shared_experts * moe.expert_intermediate_size
        yield "--moe-shared-expert-intermediate-size", str(shared)
    if moe.first_dense_layers:
        rest = model.num_layers - moe.first_dense_layers
        yield "--moe-layer-freq", f"([0]*{moe.first_dense_layers}+[1]*{rest})"
    if moe.router == "sigmoid_noaux_tc":
        yield "--moe-router-score-function", "sigmoid"
        yield ("--moe-router-enable-expert-bias",)
        yield "--moe-router-bias-update-rate", f"{moe.bias_update_rate:g}"
    else:
        yield "--moe-router-score-function", "softmax"
        if not moe.norm_top_k_prob:
            yield ("--moe-router-pre-softmax",)
    if moe.num_groups > 1:
        yield "--moe-router-num-groups", str(moe.num_groups)
        yield "--moe-router-group-topk", str(moe.top_k_groups)
    if moe.routed_scaling_factor != 1:
        yield "--moe-router-topk-scaling-factor", f"{moe.routed_scaling_factor:g}"
    if moe.sequence_balance_loss > 0:
        yield "--moe-router-load-balancing-type", "seq_aux_loss"
        yield "--moe-aux-loss-coeff", f"{moe.sequence_balance_loss:g}"
    else:
        yield "--moe-router-load-balancing-type", "none"
    yield ("--moe-grouped-gemm",)
    yield "--moe-router-dtype", "fp32"
    yield "--moe-token-dispatcher-type", "alltoall"
