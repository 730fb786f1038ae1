"""A ModelSpec becomes the config.json of its family, refused where the family cannot say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.models.hf.config import import_config
from flopwright.models.hf.families import FAMILIES
from flopwright.models.hf.glm import write_glm4_moe
from flopwright.models.hf.gpt_oss import write_gpt_oss
from flopwright.models.hf.kimi import write_kimi_k3, write_kimi_linear
from flopwright.models.hf.minimax import write_minimax_m2
from flopwright.models.hf.rope import rope_fields
from flopwright.spec.model import GqaAttention, MlaAttention, ModelSpec, Moe

Config = dict[str, Any]

# Fields of a ModelSpec that no config.json has: what a model is called, and how it is trained.
_NOT_IN_CONFIGS: Final = frozenset(
    {
        "name",
        "source",
        "mtp_loss_weight",
        "attention.indexer.loss_weight",
        "moe.balance",
        "moe.bias_update_rate",
        "moe.sequence_balance_loss",
    }
)


def _common(spec: ModelSpec) -> Config:
    return {
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.mlp.intermediate_size,
        "max_position_embeddings": spec.max_seq_len,
        "num_attention_heads": spec.attention.num_heads,
        "num_hidden_layers": spec.num_layers,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "vocab_size": spec.vocab_size,
    }


def _gqa(spec: ModelSpec) -> Config:
    attn = spec.attention
    if not isinstance(attn, GqaAttention):
        raise _wrong(spec, "attention.kind", attn.kind, "gqa")
    rope = rope_fields(attn.rope) if attn.rope is not None else {}
    return {"num_key_value_heads": attn.num_kv_heads, "head_dim": attn.head_dim, **rope}


def _windows(spec: ModelSpec) -> Config:
    attn = spec.attention
    assert isinstance(attn, GqaAttention)
    return {
        "use_sliding_window": attn.sliding_window is not None,
        "sliding_window": attn.sliding_window,
        "max_window_layers": attn.first_window_layer
        if attn.sliding_window is not None
        else spec.num_layers,
    }


def _moe(spec: ModelSpec) -> Moe:
    if spec.moe is None:
        raise _wrong(spec, "moe", "none", "a mixture of experts")
    return spec.moe


def _llama(spec: ModelSpec) -> Config:
    gqa = _gqa(spec)
    bias = isinstance(spec.attention, GqaAttention) and spec.attention.bias
    return {**_common(spec), **gqa, "attention_bias": bias, "mlp_bias": spec.mlp.bias}


def _qwen2(spec: ModelSpec) -> Config:
    return {**_common(spec), **_gqa(spec), **_windows(spec)}


def _qwen3(spec: ModelSpec) -> Config:
    gqa = _gqa(spec)
    bias = isinstance(spec.attention, GqaAttention) and spec.attention.bias
    return {**_common(spec), **gqa, **_windows(spec), "attention_bias": bias}


def _qwen3_moe(spec: ModelSpec) -> Config:
    moe, config = _moe(spec), _qwen3(spec)
    if spec.sliding_window(0) is None:  # no layer-wise choice in this family
        config["max_window_layers"] = spec.num_layers
    return {
        **config,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(moe.first_dense_layers)),
        "moe_intermediate_size": moe.expert_intermediate_size,
        "norm_topk_prob": moe.norm_top_k_prob,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
    }


def _mixtral(spec: ModelSpec) -> Config:
    moe, config = _moe(spec), {**_common(spec), **_gqa(spec)}
    attn = spec.attention
    assert isinstance(attn, GqaAttention)
    return {
        **config,
        "intermediate_size": moe.expert_intermediate_size,
        "num_experts_per_tok": moe.top_k,
        "num_local_experts": moe.num_experts,
        "sliding_window": attn.sliding_window,
    }


def _deepseek(spec: ModelSpec) -> Config:
    attn, moe = spec.attention, _moe(spec)
    if not isinstance(attn, MlaAttention):
        raise _wrong(spec, "attention.kind", attn.kind, "mla")
    if attn.rope is None:
        raise _wrong(spec, "attention.rope", "none", "rotary embedding")
    return {
        **_common(spec),
        **rope_fields(attn.rope),
        "attention_bias": False,
        "first_k_dense_replace": moe.first_dense_layers,
        "kv_lora_rank": attn.kv_lora_rank,
        "moe_intermediate_size": moe.expert_intermediate_size,
        "moe_layer_freq": 1,
        "n_group": moe.num_groups,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.num_shared_experts,
        "norm_topk_prob": moe.norm_top_k_prob,
        "num_experts_per_tok": moe.top_k,
        "num_key_value_heads": attn.num_heads,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": attn.q_lora_rank,
        "qk_nope_head_dim": attn.qk_nope_head_dim,
        "qk_rope_head_dim": attn.qk_rope_head_dim,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "topk_group": moe.top_k_groups,
        "topk_method": "noaux_tc",
        "v_head_dim": attn.v_head_dim,
    }


def _deepseek_v32(spec: ModelSpec) -> Config:
    config, attn = _deepseek(spec), spec.attention
    index = attn.indexer if isinstance(attn, MlaAttention) else None
    if index is None:
        raise _wrong(spec, "attention.indexer", "none", "an indexer in every layer")
    return {
        **config,
        "index_head_dim": index.head_dim,
        "index_n_heads": index.num_heads,
        "index_topk": index.top_k,
    }


def _kimi(spec: ModelSpec) -> Config:
    _moe(spec)
    attn = spec.attention
    if not isinstance(attn, MlaAttention):
        raise _wrong(spec, "attention.kind", attn.kind, "mla")
    if spec.linear_attention is None:
        raise _wrong(spec, "linear_attention", "none", "linear attention in most layers")
    return write_kimi_k3(spec) if spec.family == "kimi_k3" else write_kimi_linear(spec)


_NEWER: Final[dict[str, Callable[[ModelSpec, GqaAttention, Moe], Config]]] = {
    "glm4_moe": write_glm4_moe,
    "gpt_oss": write_gpt_oss,
    "minimax_m2": write_minimax_m2,
}


def _newer_moe(spec: ModelSpec) -> Config:
    attn, moe = spec.attention, _moe(spec)
    if not isinstance(attn, GqaAttention):
        raise _wrong(spec, "attention.kind", attn.kind, "gqa")
    return _NEWER[spec.family](spec, attn, moe)


def _gpt2(spec: ModelSpec) -> Config:
    return {
        "activation_function": "gelu_new",
        # Nothing here drops activations; transformers would by default.
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "layer_norm_epsilon": spec.norm_eps,
        "n_embd": spec.hidden_size,
        "n_head": spec.attention.num_heads,
        "n_inner": spec.mlp.intermediate_size,
        "n_layer": spec.num_layers,
        "n_positions": spec.max_seq_len,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": spec.tied_embeddings,
        "vocab_size": spec.vocab_size,
    }


_WRITERS: Final[dict[str, Callable[[ModelSpec], Config]]] = {
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek_v32,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "glm4_moe": _newer_moe,
    "gpt_oss": _newer_moe,
    "minimax_m2": _newer_moe,
    "kimi_linear": _kimi,
    "kimi_k3": _kimi,
}


def _wrong(spec: ModelSpec, field: str, value: Any, needed: str) -> InputError:
    return InputError(
        Violation(
            field=field,
            value=str(value),
            rule=f"a config.json of family {spec.family} cannot say it",
            limit=needed,
        )
    )


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict):
        return {prefix: data}
    return {
        path: value
        for key, inner in data.items()
        for path, value in _flat(inner, f"{prefix}.{key}" if prefix else key).items()
    }


def hf_config(spec: ModelSpec) -> Config:
    """Returns the config.json object of a model, in the layout of its family's releases.

    What it says is read back and must give the same model: a trait that the family's config
    has no field for is refused, never dropped.

    Raises:
        InputError: an unknown family, and every trait that it cannot express.
    """
    writer = _WRITERS.get(spec.family)
    if writer is None:
        raise InputError(
            Violation(
                field="family",
                value=repr(spec.family),
                rule="there is no config.json layout for it",
                nearest_fix=did_you_mean(spec.family, _WRITERS),
            )
        )
    config: Config = {
        "architectures": [FAMILIES[spec.family].architectures[0]],
        "model_type": spec.family,
        **writer(spec),
    }
    said, meant = _flat(import_config(config).spec.to_data()), _flat(spec.to_data())
    skipped = set(_NOT_IN_CONFIGS)
    if spec.moe is not None and spec.moe.first_dense_layers == 0:
        skipped.add("mlp.intermediate_size")  # no layer has a dense block
    wrong = [
        Violation(
            field=path,
            value=str(meant.get(path, "none")),
            rule=f"a config.json of family {spec.family} cannot say it",
            limit=f"it says {said.get(path, 'none')}",
        )
        for path in sorted({*said, *meant} - skipped)
        if said.get(path) != meant.get(path)
    ]
    if wrong:
        raise InputError(wrong)
    return config
