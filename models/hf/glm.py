"""What the config.json of GLM-4.5 says, in and out."""

from __future__ import annotations

from typing import Any, Final

from flopwright.models.hf.fields import Fields
from flopwright.models.hf.rope import read_rope, rope_fields
from flopwright.spec.model import GqaAttention, ModelSpec, Moe

Data = dict[str, Any]
_TURNED: Final = 0.5  # of a head's columns, where the config does not say


def read_glm4_moe(fields: Fields) -> Data:
    """Returns the ModelSpec's data of a config."""
    fields.only("hidden_act", "silu", "swish", why="the feed-forward block is SwiGLU")
    fields.only("attention_dropout", 0, 0.0, why="nothing here drops activations")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    extra = max(fields.count(n, 0) for n in ("num_nextn_predict_layers", "num_mtp_layers"))
    if extra:
        fields.notes.append(f"without its {extra} multi-token prediction layer(s)")
    return {
        "hidden_size": hidden,
        "num_layers": fields.integer("num_hidden_layers"),
        "vocab_size": fields.integer("vocab_size"),
        "max_seq_len": fields.integer("max_position_embeddings"),
        "tied_embeddings": fields.flag("tie_word_embeddings"),
        "norm_eps": fields.number("rms_norm_eps", 1e-5),
        "attention": {
            "kind": "gqa",
            "num_heads": heads,
            "num_kv_heads": fields.integer("num_key_value_heads", heads),
            "head_dim": fields.integer("head_dim", max(1, hidden // heads)),
            "qk_norm": fields.flag("use_qk_norm"),
            "bias": fields.flag("attention_bias"),
            "rope": read_rope(fields, 1e4, _TURNED),
        },
        "mlp": {"kind": "swiglu", "intermediate_size": fields.integer("intermediate_size")},
        "moe": {
            "num_experts": fields.integer("n_routed_experts"),
            "top_k": fields.integer("num_experts_per_tok"),
            "expert_intermediate_size": fields.integer("moe_intermediate_size"),
            "num_shared_experts": fields.count("n_shared_experts", 0),
            "first_dense_layers": fields.count("first_k_dense_replace", 1),
            "router": "sigmoid_noaux_tc",
            "num_groups": fields.integer("n_group", 1),
            "top_k_groups": fields.integer("topk_group", 1),
            "norm_top_k_prob": fields.flag("norm_topk_prob", True),
            "routed_scaling_factor": fields.number("routed_scaling_factor", 1.0),
        },
    }


def write_glm4_moe(spec: ModelSpec, attn: GqaAttention, moe: Moe) -> Data:
    """Returns the config of a model, in the layout of the releases."""
    rope = rope_fields(attn.rope) if attn.rope is not None else {}
    return {
        "attention_bias": attn.bias,
        "first_k_dense_replace": moe.first_dense_layers,
        "head_dim": attn.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.mlp.intermediate_size,
        "max_position_embeddings": spec.max_seq_len,
        "moe_intermediate_size": moe.expert_intermediate_size,
        "n_group": moe.num_groups,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.num_shared_experts,
        "norm_topk_prob": moe.norm_top_k_prob,
        "num_attention_heads": attn.num_heads,
        "num_experts_per_tok": moe.top_k,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": attn.num_kv_heads,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": spec.norm_eps,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "tie_word_embeddings": spec.tied_embeddings,
        "topk_group": moe.top_k_groups,
        "use_qk_norm": attn.qk_norm,
        "vocab_size": spec.vocab_size,
        **rope,
    }
