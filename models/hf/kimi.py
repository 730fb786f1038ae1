"""What the config.json of Kimi Linear and Kimi K3 say, in and out.

Kimi K3's text model stands in a `text_config` beside a vision tower.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from flopwright.models.hf.fields import Fields
from flopwright.spec.model import KdaAttention, MlaAttention, ModelSpec, Moe

Data = dict[str, Any]
Config = dict[str, Any]
# Norms of latents in this family have an epsilon of their own in its code.
LATENT_NORM_EPS: Final = 1e-6
# Of a vision tower, what adds no weight and no product.
_TOWER_HARMLESS: Final = (
    "_attn_implementation", "activation_func", "init_pos_emb_time", "merge_type", "model_type",
    "max_pos_emb_height", "max_pos_emb_width", "pos_emb_interpolation_mode", "pos_emb_type",
    "projector_hidden_act", "projector_ln_eps", "rope_theta", "video_attn_type",
)  # fmt: skip
_TRANSFORMERS: Final = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")


def read_kimi_linear(fields: Fields) -> Data:
    """Returns the ModelSpec's data of a text config."""
    layers = fields.integer("num_hidden_layers")
    data: Data = {
        "hidden_size": fields.integer("hidden_size"),
        "num_layers": layers,
        "vocab_size": fields.integer("vocab_size"),
        "max_seq_len": _max_seq_len(fields),
        "tied_embeddings": fields.flag("tie_word_embeddings"),
        "norm_eps": fields.number("rms_norm_eps", 1e-5),
        "attn_res_block": fields.integer("attn_res_block_size", None),
        "attention": _attention(fields),
        "mlp": _mlp(fields),
        "moe": _moe(fields, layers),
    }
    linear, full = _linear(fields, layers)
    extra = fields.count("num_nextn_predict_layers", 0)
    if extra:
        fields.notes.append(f"without its {extra} multi-token prediction layer(s)")
    fields.harmless(("rope_theta", "rope_scaling", "rope_parameters", "head_dim", "max_seq_len"))
    return {**data, "linear_attention": linear, "full_attention_layers": full}


def read_kimi_k3(fields: Fields, harmless: Iterable[str]) -> Data:
    """Returns the ModelSpec's data of the text model inside.

    Args:
        harmless: fields of it that change neither its shape nor its function.
    """
    text = fields.section("text_config")
    fields.harmless(("media_placeholder_token_id", "ignore_index", "tie_word_embeddings"))
    tower = fields.section("vision_config")
    if text is None:
        fields.refuse("text_config", "a required field is missing")
        return {}
    text.harmless((*harmless, "quantization_config"))
    data = read_kimi_linear(text)
    data["moe"] = {**data["moe"], "balance": "quantile"}
    data["attention"].pop("latent_norm_eps")
    text.close()
    if tower is not None:
        data["vision"] = _tower(tower, data["hidden_size"])
    return data


def _tower(fields: Fields, text_hidden: int) -> Data:
    """Returns what a vision_config says, but for how positions are made between patches."""
    merge = fields.raw("merge_kernel_size") or [2, 2]
    if merge not in ([2, 2], 2) and not (isinstance(merge, list) and len(set(merge)) == 1):
        fields.refuse("merge_kernel_size", "must be as many patches in both directions")
        merge = [2, 2]
    rows = fields.integer("init_pos_emb_height", 64)
    fields.only("init_pos_emb_width", rows, why="the table of positions is a square")
    hidden = fields.integer("vt_hidden_size")
    fields.only("mm_hidden_size", hidden, why="the projector reads the tower's own width")
    fields.only("text_hidden_size", text_hidden, why="the projector ends in the text's width")
    fields.only("norm_type", "rmsnorm", why="norms of this family's tower have one weight")
    fields.only("mlp_type", "mlp2", why="its feed-forward block has two matrices")
    fields.only("mm_projector_type", "patchmergerv2", why="its projector has two matrices")
    for name in ("attn_bias", "linear_bias", "patch_embed_proj_bias"):
        fields.only(name, False, why="this family's tower has no biases")
    data = {
        "num_layers": fields.integer("vt_num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": fields.integer("vt_num_attention_heads"),
        "qkv_size": fields.integer("qkv_hidden_size", hidden),
        "intermediate_size": fields.integer("vt_intermediate_size"),
        "patch_size": fields.integer("patch_size", 14),
        "position_table": rows,
        "merge": merge if isinstance(merge, int) else merge[0],
    }
    fields.harmless(_TOWER_HARMLESS)
    fields.close()
    return data


def _max_seq_len(fields: Fields) -> int:
    names = ("model_max_length", "max_position_embeddings")
    given = [fields.integer(name, None) for name in names]
    return next((value for value in given if value is not None), 1_048_576)


def _attention(fields: Fields) -> Data:
    heads = fields.integer("num_attention_heads")
    fields.only("num_key_value_heads", heads, why="latent attention has a key for every head")
    fields.only("mla_use_nope", True, why="this family's keys know no positions")
    fields.only("attention_bias", False, why="latent attention has no biases here")
    fields.only("attention_dropout", 0, 0.0, why="nothing here drops activations")
    nope, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    fields.only("qk_head_dim", nope + rope, why="must be qk_nope + qk_rope_head_dim")
    return {
        "kind": "mla",
        "num_heads": heads,
        "q_lora_rank": fields.integer("q_lora_rank", None),
        "kv_lora_rank": fields.integer("kv_lora_rank"),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": fields.integer("v_head_dim"),
        "rope": None,
        "output_gate": fields.flag("mla_use_output_gate"),
        "latent_norm_eps": LATENT_NORM_EPS,
    }


def _linear(fields: Fields, layers: int) -> tuple[Data, list[int]]:
    """Returns linear attention, and the layers (from 0) that have full attention."""
    section = fields.section("linear_attn_config")
    if section is None:
        fields.harmless(_TRANSFORMERS)
        heads, width = (
            fields.integer("linear_num_heads", 32),
            fields.integer("linear_head_dim", 128),
        )
        data: Data = {
            "num_heads": heads, "head_dim": width, "output_gate_rank": width,
            "conv_kernel": fields.integer("linear_conv_kernel_dim", 4),
        }  # fmt: skip
        full = _full_of_types(fields, layers)
    else:
        fields.harmless((*_TRANSFORMERS, "layer_types"))
        width = section.integer("head_dim")
        bound = section.raw("gate_lower_bound")
        data = {
            "num_heads": section.integer("num_heads"),
            "head_dim": width,
            "conv_kernel": section.integer("short_conv_kernel_size", 4),
            "output_gate_rank": None if section.flag("use_full_rank_gate") else width,
            "decay_lower_bound": bound,
        }
        full = _full_of_lists(section, layers)
        section.close()
    return {"kind": "kda", "gate_rank": width, **data}, full


def _full_of_types(fields: Fields, layers: int) -> list[int]:
    kinds = fields.raw("layer_types")
    names = ("full_attention", "linear_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in names for k in kinds):
        fields.refuse("layer_types", f"must be {' or '.join(names)} for each of {layers} layers")
        return [layers - 1]
    return [i for i, kind in enumerate(kinds) if kind == names[0]]


def _full_of_lists(section: Fields, layers: int) -> list[int]:
    full, linear = section.raw("full_attn_layers"), section.raw("kda_layers")
    if linear is None and isinstance(full, list):
        linear = [i for i in range(1, layers + 1) if i not in full]
    both = [*full, *linear] if isinstance(full, list) and isinstance(linear, list) else []
    whole = all(type(i) is int for i in both) and sorted(both) == list(range(1, layers + 1))
    if not whole or not full:
        section.refuse("full_attn_layers", f"must with kda_layers make the layers 1 to {layers}")
        return [layers - 1]
    return sorted(i - 1 for i in full)


def _mlp(fields: Fields) -> Data:
    width = fields.integer("intermediate_size")
    fields.only("hidden_act", "silu", "swish", "situ", why="must be SwiGLU or SiTU-GLU")
    if fields.raw("hidden_act") != "situ":
        fields.harmless(("activation_situ_beta", "activation_situ_linear_beta"))
        return {"kind": "swiglu", "intermediate_size": width}
    return {
        "kind": "situ_glu",
        "intermediate_size": width,
        "gate_bound": fields.number("activation_situ_beta"),
        "up_bound": fields.number("activation_situ_linear_beta"),
    }


def _moe(fields: Fields, layers: int) -> Data:
    fields.only("moe_router_activation_func", "sigmoid", why="this family's router is a sigmoid")
    fields.only("topk_method", "noaux_tc", why="the router balances without a loss")
    fields.only("moe_layer_freq", 1, why="every layer after the dense ones has experts")
    fields.only("use_grouped_topk", True, why="the choice goes by groups, if only one")
    latent = fields.integer("routed_expert_hidden_size", None)
    if latent is not None:
        fields.only("latent_moe_use_norm", True, why="the experts' sum is normalised here")
        if fields.raw("latent_moe_use_norm") is None:
            fields.refuse("latent_moe_use_norm", "a latent width goes with its norm", "true")
    fields.harmless(("latent_moe_use_norm",))
    first = fields.count("first_k_dense_replace", _dense_of_types(fields, layers))
    return {
        "num_experts": fields.integer("num_experts"),
        "top_k": fields.integer("num_experts_per_token"),
        "expert_intermediate_size": fields.integer("moe_intermediate_size"),
        "num_shared_experts": fields.count("num_shared_experts", 0),
        "first_dense_layers": first,
        "router": "sigmoid_noaux_tc",
        "num_groups": fields.integer("num_expert_group", 1),
        "top_k_groups": fields.integer("topk_group", 1),
        "norm_top_k_prob": fields.flag("moe_renormalize", True),
        "routed_scaling_factor": fields.number("routed_scaling_factor", 1.0),
        "latent_size": latent,
    }


def _dense_of_types(fields: Fields, layers: int) -> int:
    """Returns the dense layers at the front, as transformers writes them."""
    kinds = fields.raw("mlp_layer_types")
    if not isinstance(kinds, list):
        return 1
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        fields.refuse("mlp_layer_types", "dense layers must be the first ones")
    return dense


def write_kimi_linear(spec: ModelSpec) -> Config:
    """Returns the text config of a model, in the layout of the releases."""
    attn, linear, moe = spec.attention, spec.linear_attention, spec.moe
    assert isinstance(attn, MlaAttention)
    assert linear is not None
    assert moe is not None
    config: Config = {
        "first_k_dense_replace": moe.first_dense_layers,
        "hidden_act": "situ" if spec.mlp.bounds else "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.mlp.intermediate_size,
        "kv_lora_rank": attn.kv_lora_rank,
        "linear_attn_config": _linear_config(spec, linear),
        "mla_use_nope": True,
        "model_max_length": spec.max_seq_len,
        "num_attention_heads": attn.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": attn.num_heads,
        "num_nextn_predict_layers": 0,
        "pad_token_id": None,  # transformers' default would not fit small vocabularies
        "q_lora_rank": attn.q_lora_rank,
        "qk_nope_head_dim": attn.qk_nope_head_dim,
        "qk_rope_head_dim": attn.qk_rope_head_dim,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "v_head_dim": attn.v_head_dim,
        "vocab_size": spec.vocab_size,
        **_moe_config(moe),
    }
    if attn.output_gate:
        config["mla_use_output_gate"] = True
    if spec.mlp.bounds:
        gate, up = spec.mlp.bounds
        config |= {"activation_situ_beta": gate, "activation_situ_linear_beta": up}
    if spec.attn_res_block is not None:
        config["attn_res_block_size"] = spec.attn_res_block
    return config


def _linear_config(spec: ModelSpec, linear: KdaAttention) -> Config:
    full = [i + 1 for i in spec.full_attention_layers or ()]
    config: Config = {
        "full_attn_layers": full,
        "head_dim": linear.head_dim,
        "kda_layers": [i for i in range(1, spec.num_layers + 1) if i not in full],
        "num_heads": linear.num_heads,
        "short_conv_kernel_size": linear.conv_kernel,
    }
    if linear.output_gate_rank is None:
        config["use_full_rank_gate"] = True
    if linear.decay_lower_bound is not None:
        config["gate_lower_bound"] = linear.decay_lower_bound
    return config


def _moe_config(moe: Moe) -> Config:
    config: Config = {
        "moe_intermediate_size": moe.expert_intermediate_size,
        "moe_layer_freq": 1,
        "moe_renormalize": moe.norm_top_k_prob,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": moe.num_groups,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.top_k,
        "num_shared_experts": moe.num_shared_experts,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "topk_group": moe.top_k_groups,
        "use_grouped_topk": True,
    }
    if moe.latent_size is not None:
        config |= {"routed_expert_hidden_size": moe.latent_size, "latent_moe_use_norm": True}
    return config


def write_kimi_k3(spec: ModelSpec) -> Config:
    """Returns the config of a Kimi K3, its vision tower beside the text model."""
    text = {"model_type": "kimi_linear", **write_kimi_linear(spec)}
    config: Config = {"text_config": text, "tie_word_embeddings": spec.tied_embeddings}
    tower = spec.vision
    if tower is not None:
        config["vision_config"] = {
            "init_pos_emb_height": tower.position_table,
            "init_pos_emb_width": tower.position_table,
            "merge_kernel_size": [tower.merge, tower.merge],
            "mm_hidden_size": tower.hidden_size,
            "patch_size": tower.patch_size,
            "qkv_hidden_size": tower.qkv_size,
            "text_hidden_size": spec.hidden_size,
            "vt_hidden_size": tower.hidden_size,
            "vt_intermediate_size": tower.intermediate_size,
            "vt_num_attention_heads": tower.num_heads,
            "vt_num_hidden_layers": tower.num_layers,
        }
    return config
