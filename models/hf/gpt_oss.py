"""What the config.json of gpt-oss says, in and out."""

from __future__ import annotations

from typing import Any, Final

from flopwright.models.hf.fields import Fields
from flopwright.models.hf.rope import read_rope, rope_fields
from flopwright.spec.model import GqaAttention, ModelSpec, Moe

Data = dict[str, Any]
_KINDS: Final = ("full_attention", "sliding_attention")


def read_gpt_oss(fields: Fields) -> Data:
    """Returns the ModelSpec's data of a config."""
    fields.only("hidden_act", "silu", why="the feed-forward block is gpt-oss's clamped GLU")
    fields.only("attention_dropout", 0, 0.0, why="nothing here drops activations")
    fields.only("swiglu_alpha", 1.702, why="the gate's sigmoid has this factor here")
    fields.harmless(("router_aux_loss_coef", "initial_context_length"))
    layers, width = fields.integer("num_hidden_layers"), fields.integer("intermediate_size")
    bias, top_k = fields.flag("attention_bias", True), fields.integer("num_experts_per_tok", 4)
    fields.only("experts_per_token", top_k, why="must equal num_experts_per_tok")
    window, every = fields.integer("sliding_window", 128), _full_every(fields, layers)
    heads = fields.integer("num_attention_heads")
    return {
        "hidden_size": fields.integer("hidden_size"),
        "num_layers": layers,
        "vocab_size": fields.integer("vocab_size"),
        "max_seq_len": fields.integer("max_position_embeddings"),
        "tied_embeddings": fields.flag("tie_word_embeddings"),
        "norm_eps": fields.number("rms_norm_eps", 1e-5),
        "attention": {
            "kind": "gqa",
            "num_heads": heads,
            "num_kv_heads": fields.integer("num_key_value_heads", heads),
            "head_dim": fields.integer("head_dim"),
            "bias": bias,
            "o_bias": bias,
            "sinks": True,
            "sliding_window": window,
            "full_every": every,
            "rope": read_rope(fields, 150000.0),
        },
        "mlp": {
            "kind": "clamped_glu",
            "intermediate_size": width,
            "limit": fields.number("swiglu_limit", 7.0),
        },
        "moe": {
            "num_experts": fields.integer("num_local_experts"),
            "top_k": top_k,
            "expert_intermediate_size": width,
            "router": "softmax",
            "bias": True,
        },
    }


def _full_every(fields: Fields, layers: int) -> int:
    """Returns how often a layer sees everything; every second where the config does not say."""
    kinds = fields.raw("layer_types")
    if kinds is None:
        return 2
    known = isinstance(kinds, list) and len(kinds) == layers and _KINDS[0] in kinds
    every = kinds.index(_KINDS[0]) + 1 if known else 2
    if not known or kinds != [_KINDS[(i + 1) % every != 0] for i in range(layers)]:
        fields.refuse("layer_types", "must be a full layer after every so many sliding ones")
    return every


def write_gpt_oss(spec: ModelSpec, attn: GqaAttention, moe: Moe) -> Data:
    """Returns the config of a model, in the layout of the releases."""
    rope = rope_fields(attn.rope) if attn.rope is not None else {}
    every = attn.full_every or 1
    return {
        "attention_bias": attn.bias,
        "head_dim": attn.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": moe.expert_intermediate_size,
        "layer_types": [_KINDS[(i + 1) % every != 0] for i in range(spec.num_layers)],
        "max_position_embeddings": spec.max_seq_len,
        "num_attention_heads": attn.num_heads,
        "num_experts_per_tok": moe.top_k,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": attn.num_kv_heads,
        "num_local_experts": moe.num_experts,
        "rms_norm_eps": spec.norm_eps,
        "sliding_window": attn.sliding_window,
        "swiglu_limit": spec.mlp.limit,
        "tie_word_embeddings": spec.tied_embeddings,
        "vocab_size": spec.vocab_size,
        **rope,
    }
