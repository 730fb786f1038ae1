"""What each family's config.json says, field by field, as the data of a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from flopwright.models.hf.fields import Fields
from flopwright.models.hf.glm import read_glm4_moe
from flopwright.models.hf.gpt_oss import read_gpt_oss
from flopwright.models.hf.kimi import read_kimi_k3, read_kimi_linear
from flopwright.models.hf.minimax import read_minimax_m2
from flopwright.models.hf.rope import read_rope

# Neither shape nor function of the model: identity, tokens, storage, generation defaults.
HARMLESS: Final = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "add_bos_token",
    "architectures", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token",
    "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token",
    "eos_token_id", "ep_size", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "length_penalty",
    "max_length", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_router_logits", "output_scores", "pad_token_id", "prefix", "pretraining_tp",
    "problem_type", "remove_invalid_values", "repetition_penalty", "return_dict",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers_version", "typical_p", "unsloth_version", "use_bfloat16",
    "use_cache",
})  # fmt: skip

Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """How one model_type is read.

    Attributes:
        name: the family of the ModelSpec.
        architectures: classes with this family's language-model head.
        read: returns the ModelSpec's data, without name, family and source.
    """

    name: str
    architectures: tuple[str, ...]
    read: Callable[[Fields], Data]


def _common(fields: Fields, eps: float = 1e-6) -> Data:
    fields.only("hidden_act", "silu", "swish", why="the feed-forward block is SwiGLU")
    dropout(fields, "attention_dropout")
    return {
        "hidden_size": fields.integer("hidden_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "vocab_size": fields.integer("vocab_size"),
        "max_seq_len": fields.integer("max_position_embeddings"),
        "tied_embeddings": fields.flag("tie_word_embeddings"),
        "norm_eps": fields.number("rms_norm_eps", eps),
    }


def dropout(fields: Fields, *names: str) -> None:
    """Accepts dropout rates; one that is not 0 is noted, for nothing here drops activations."""
    for name in names:
        value = fields.raw(name)
        if value is None or value == 0:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
            fields.refuse(name, "must be a rate between 0 and 1")
        else:
            fields.notes.append(f"no dropout ({name} {value:g})")


def _gqa(fields: Fields, data: Data, **traits: Any) -> Data:
    heads = fields.integer("num_attention_heads")
    if not fields.has("head_dim") and data["hidden_size"] % heads:
        fields.refuse("num_attention_heads", "must divide hidden_size, or give head_dim")
    return {
        "kind": "gqa",
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": fields.integer("head_dim", max(1, data["hidden_size"] // heads)),
        **traits,
    }


def _swiglu(fields: Fields, **traits: Any) -> Data:
    return {
        "kind": "swiglu",
        "intermediate_size": fields.integer("intermediate_size"),
        **traits,
    }


def _llama(fields: Fields) -> Data:
    data, bias = _common(fields), fields.flag("attention_bias")
    rope = read_rope(fields, 1e4)
    data["attention"] = _gqa(fields, data, rope=rope, bias=bias, o_bias=bias)
    data["mlp"] = _swiglu(fields, bias=fields.flag("mlp_bias"))
    return data


def _windows(fields: Fields, num_layers: int) -> Data:
    """Returns the sliding window of Qwen2 and Qwen3, and the first layer that has it."""
    used = fields.flag("use_sliding_window")
    window = fields.integer("sliding_window", None) if used else None
    first = fields.count("max_window_layers", 28)
    kinds = fields.raw("layer_types")
    fields.harmless(("sliding_window",))
    if kinds is not None:
        names = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or any(k not in names for k in kinds):
            fields.refuse("layer_types", f"must be a list of {' and '.join(names)}")
            return {}
        first = kinds.count("full_attention")
        in_order = [names[0]] * first + [names[1]] * (len(kinds) - first)
        if len(kinds) != num_layers or kinds != in_order:
            fields.refuse("layer_types", "must be full layers, then sliding ones, one each layer")
        if first < len(kinds) and window is None:
            fields.refuse("layer_types", "sliding layers without a sliding_window in use")
    if window is None or first >= num_layers:
        return {}
    return {"sliding_window": window, "first_window_layer": first}


def _qwen2(fields: Fields) -> Data:
    data = _common(fields)
    windows = _windows(fields, data["num_layers"])
    data["attention"] = _gqa(fields, data, rope=read_rope(fields, 1e4), bias=True, **windows)
    data["mlp"] = _swiglu(fields)
    return data


def _qwen3(fields: Fields) -> Data:
    data, bias = _common(fields), fields.flag("attention_bias")
    windows = _windows(fields, data["num_layers"])
    rope = read_rope(fields, 1e4)
    data["attention"] = _gqa(
        fields, data, qk_norm=True, rope=rope, bias=bias, o_bias=bias, **windows
    )
    data["mlp"] = _swiglu(fields)
    return data


def _qwen3_moe(fields: Fields) -> Data:
    data, bias = _common(fields), fields.flag("attention_bias")
    used = fields.flag("use_sliding_window")
    window = fields.integer("sliding_window", None) if used else None
    fields.harmless(("sliding_window", "max_window_layers", "layer_types"))
    rope = read_rope(fields, 1e4)
    data["attention"] = _gqa(
        fields, data, qk_norm=True, rope=rope, bias=bias, o_bias=bias, sliding_window=window
    )
    data["mlp"] = _swiglu(fields)
    fields.only("decoder_sparse_step", 1, why="every layer after the dense ones has experts")
    dense = fields.raw("mlp_only_layers") or []
    if dense != list(range(len(dense))):
        fields.refuse("mlp_only_layers", "dense layers must be the first ones")
        dense = []
    experts = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    data["moe"] = {
        "num_experts": fields.integer(experts),
        "top_k": fields.integer("num_experts_per_tok"),
        "expert_intermediate_size": fields.integer("moe_intermediate_size"),
        "first_dense_layers": len(dense),
        "router": "softmax",
        "norm_top_k_prob": fields.flag("norm_topk_prob"),
    }
    fields.harmless(("router_aux_loss_coef",))
    return data


def _mixtral(fields: Fields) -> Data:
    data = _common(fields, eps=1e-5)
    rope, window = read_rope(fields, 1e6), fields.integer("sliding_window", None)
    data["attention"] = _gqa(fields, data, rope=rope, sliding_window=window)
    data["mlp"] = _swiglu(fields)
    data["moe"] = {
        "num_experts": fields.integer("num_local_experts"),
        "top_k": fields.integer("num_experts_per_tok"),
        "expert_intermediate_size": data["mlp"]["intermediate_size"],
        "router": "softmax",
    }
    fields.only("router_jitter_noise", 0, why="the router sees its input without noise")
    fields.harmless(("router_aux_loss_coef",))
    return data


def _mla(fields: Fields) -> Data:
    heads, rope_dim = fields.integer("num_attention_heads"), fields.integer("qk_rope_head_dim")
    nope_dim = fields.integer("qk_nope_head_dim")
    fields.only("num_key_value_heads", heads, why="latent attention has a key for every head")
    fields.only("attention_bias", False, why="latent attention has no biases here")
    fields.only("rope_interleave", True, why="rotary pairs are neighbours in this family")
    # transformers 5 writes two derived widths.
    fields.only("head_dim", rope_dim, why="must equal qk_rope_head_dim")
    fields.only("qk_head_dim", rope_dim + nope_dim, why="must be qk_nope + qk_rope_head_dim")
    return {
        "kind": "mla",
        "num_heads": heads,
        "q_lora_rank": fields.integer("q_lora_rank", None),
        "kv_lora_rank": fields.integer("kv_lora_rank"),
        "qk_nope_head_dim": nope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": fields.integer("v_head_dim"),
        "rope": read_rope(fields, 1e4),
    }


def _deepseek(fields: Fields) -> Data:
    data = _common(fields)
    data["attention"], data["mlp"] = _mla(fields), _swiglu(fields)
    fields.only("moe_layer_freq", 1, why="every layer after the dense ones has experts")
    fields.only("scoring_func", "sigmoid", why="the router of this family is a sigmoid")
    fields.only("topk_method", "noaux_tc", why="the router balances without a loss")
    data["moe"] = {
        "num_experts": fields.integer("n_routed_experts"),
        "top_k": fields.integer("num_experts_per_tok"),
        "expert_intermediate_size": fields.integer("moe_intermediate_size"),
        "num_shared_experts": fields.count("n_shared_experts", 0),
        "first_dense_layers": fields.count("first_k_dense_replace"),
        "router": "sigmoid_noaux_tc",
        "num_groups": fields.integer("n_group", 1),
        "top_k_groups": fields.integer("topk_group", 1),
        "norm_top_k_prob": fields.flag("norm_topk_prob", True),
        "routed_scaling_factor": fields.number("routed_scaling_factor"),
    }
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        extra = fields.count(name, 0)
        if extra:
            fields.notes.append(f"without its {extra} multi-token prediction layer(s)")
    fields.harmless(("aux_loss_alpha", "seq_aux"))
    return data


def _deepseek_v32(fields: Fields) -> Data:
    """Reads DeepSeek-V3 with an indexer in every layer's attention."""
    data = _deepseek(fields)
    data["attention"]["indexer"] = {
        "num_heads": fields.integer("index_n_heads"),
        "head_dim": fields.integer("index_head_dim"),
        "top_k": fields.integer("index_topk"),
    }
    layers = data["num_layers"]
    # transformers 5 writes the kinds of its layers.
    fields.only("layer_types", ["indexed_attention"] * layers, why="every layer has an indexer")
    dense = min(data["moe"]["first_dense_layers"], layers)
    kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
    fields.only("mlp_layer_types", kinds, why="must be first_k_dense_replace dense layers first")
    fields.only("mlp_bias", False, why="feed-forward blocks of this family have no biases")
    return data


def _gpt2(fields: Fields) -> Data:
    hidden, heads = fields.integer("n_embd"), fields.integer("n_head")
    positions = fields.integer("n_positions")
    if hidden % heads:
        fields.refuse("n_head", f"must divide n_embd ({hidden})")
    fields.only(
        "activation_function", "gelu_new", "gelu_pytorch_tanh", why="GELU here is its tanh form"
    )
    fields.only("n_ctx", positions, why="must equal n_positions")
    fields.only("scale_attn_weights", True, why="scores are divided by the root of the width")
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"):
        fields.only(name, False, why="scores are scaled alike in all layers")
    fields.only("add_cross_attention", False, why="the model is a decoder alone")
    dropout(fields, "attn_pdrop", "embd_pdrop", "resid_pdrop")
    fields.harmless(
        f"summary_{x}"
        for x in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
    )
    return {
        "hidden_size": hidden,
        "num_layers": fields.integer("n_layer"),
        "vocab_size": fields.integer("vocab_size"),
        "max_seq_len": positions,
        "tied_embeddings": fields.flag("tie_word_embeddings", True),
        "norm": "layer_norm",
        "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "attention": {
            "kind": "gqa",
            "num_heads": heads,
            "num_kv_heads": heads,
            "head_dim": max(1, hidden // heads),
            "bias": True,
            "o_bias": True,
            "rope": None,
        },
        "mlp": {
            "kind": "gelu",
            "intermediate_size": fields.integer("n_inner", 4 * hidden),
            "bias": True,
        },
    }


_DEEPSEEK: Final = Family("deepseek_v3", ("DeepseekV3ForCausalLM",), _deepseek)

FAMILIES: Final[dict[str, Family]] = {
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "deepseek_v32": Family("deepseek_v32", ("DeepseekV32ForCausalLM",), _deepseek_v32),
    "llama": Family("llama", ("LlamaForCausalLM", "LLaMAForCausalLM"), _llama),
    "qwen2": Family("qwen2", ("Qwen2ForCausalLM",), _qwen2),
    "qwen3": Family("qwen3", ("Qwen3ForCausalLM",), _qwen3),
    "qwen3_moe": Family("qwen3_moe", ("Qwen3MoeForCausalLM",), _qwen3_moe),
    "mixtral": Family("mixtral", ("MixtralForCausalLM",), _mixtral),
    "gpt2": Family("gpt2", ("GPT2LMHeadModel",), _gpt2),
    "gpt_oss": Family("gpt_oss", ("GptOssForCausalLM",), read_gpt_oss),
    "glm4_moe": Family("glm4_moe", ("Glm4MoeForCausalLM",), read_glm4_moe),
    "minimax_m2": Family("minimax_m2", ("MiniMaxM2ForCausalLM",), read_minimax_m2),
    "kimi_linear": Family("kimi_linear", ("KimiLinearForCausalLM",), read_kimi_linear),
    "kimi_k3": Family(
        "kimi_k3",
        ("KimiK3ForConditionalGeneration",),
        lambda fields: read_kimi_k3(fields, HARMLESS),
    ),
}
