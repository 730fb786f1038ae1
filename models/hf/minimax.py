"""What the config.json of MiniMax-M2 says, in and out."""

from __future__ import annotations

from typing import Any

from flopwright.models.hf.fields import Fields
from flopwright.models.hf.rope import read_rope, rope_fields
from flopwright.spec.model import GqaAttention, ModelSpec, Moe

Data = dict[str, Any]


def read_minimax_m2(fields: Fields) -> Data:
    """Returns the ModelSpec's data of a config."""
    fields.only("hidden_act", "silu", "swish", why="the experts are SwiGLU")
    fields.only("attention_dropout", 0, 0.0, why="nothing here drops activations")
    fields.only("router_jitter_noise", 0, 0.0, why="the router sees its input without noise")
    fields.only("scoring_func", "sigmoid", why="this family's router is a sigmoid")
    fields.only("use_routing_bias", True, why="the choice goes by scores and a bias")
    fields.only("use_qk_norm", True, why="this family normalises queries and keys")
    fields.only("qk_norm_type", "per_layer", why="the norm is over all heads together")
    fields.only("shared_intermediate_size", 0, why="there are no shared experts")
    fields.harmless(("router_aux_loss_coef", "attn_type_list", "output_router_logits"))
    heads, width = fields.integer("num_attention_heads"), fields.integer("intermediate_size")
    dim = fields.integer("head_dim", 128)
    if fields.flag("use_mtp"):
        fields.notes.append("without its multi-token prediction layers")
    fields.harmless(("num_mtp_modules", "mtp_transformer_layers"))
    turned = fields.integer("rotary_dim", dim)
    return {
        "hidden_size": fields.integer("hidden_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "vocab_size": fields.integer("vocab_size"),
        "max_seq_len": fields.integer("max_position_embeddings"),
        "tied_embeddings": fields.flag("tie_word_embeddings"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "attention": {
            "kind": "gqa",
            "num_heads": heads,
            "num_kv_heads": fields.integer("num_key_value_heads", heads),
            "head_dim": dim,
            "qk_norm": True,
            "qk_norm_whole": True,
            "rope": read_rope(fields, 5e6, turned / dim),
        },
        "mlp": {"kind": "swiglu", "intermediate_size": width},
        "moe": {
            "num_experts": fields.integer("num_local_experts"),
            "top_k": fields.integer("num_experts_per_tok"),
            "expert_intermediate_size": width,
            "router": "sigmoid_noaux_tc",
        },
    }


def write_minimax_m2(spec: ModelSpec, attn: GqaAttention, moe: Moe) -> Data:
    """Returns the config of a model, in the layout of the releases."""
    rope = rope_fields(attn.rope) if attn.rope is not None else {}
    return {
        "head_dim": attn.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": moe.expert_intermediate_size,
        "max_position_embeddings": spec.max_seq_len,
        "num_attention_heads": attn.num_heads,
        "num_experts_per_tok": moe.top_k,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": attn.num_kv_heads,
        "num_local_experts": moe.num_experts,
        "qk_norm_type": "per_layer",
        "rms_norm_eps": spec.norm_eps,
        "rotary_dim": attn.head_dim if attn.rope is None else attn.rope.width(attn.head_dim),
        "scoring_func": "sigmoid",
        "tie_word_embeddings": spec.tied_embeddings,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": spec.vocab_size,
        **{name: value for name, value in rope.items() if name != "partial_rotary_factor"},
    }
