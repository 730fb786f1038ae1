"""config.json in and out: released configs, refused fields, and back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopwright.errors import InputError
from flopwright.models.hf.config import import_config, model_from_hf_config
from flopwright.models.hf.config_out import hf_config
from flopwright.spec.load import MODEL_CATALOG, catalog_names, load_model
from flopwright.spec.model import (
    GqaAttention,
    LinearScaling,
    Llama3Scaling,
    MlaAttention,
    ModelSpec,
    YarnScaling,
)

# Fields and values of released configs, as their model cards show them.
KIMI_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.3",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
QWEN25: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_position_embeddings": 131072,
    "max_window_layers": 64,
    "model_type": "qwen2",
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "vocab_size": 152064,
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-05,
    "vocab_size": 100,
}
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "task_specific_params": {"text-generation": {"do_sample": True}},
    "vocab_size": 50257,
}


def same_model(a: ModelSpec, b: ModelSpec) -> bool:
    """Returns whether two models are equal but for what they are called."""
    return a == b.model_copy(update={"name": a.name, "source": a.source})


def problems(config: dict[str, Any]) -> dict[str, str]:
    """Returns the refused fields with their messages."""
    with pytest.raises(InputError) as caught:
        model_from_hf_config(config)
    return {v.field: str(v) for v in caught.value.violations}


def test_kimi_k2_is_the_catalog_model_and_says_what_it_leaves_out() -> None:
    imported = import_config(KIMI_K2, name="k2")
    assert imported.spec.name == "k2"
    assert same_model(imported.spec, load_model("kimi_k2"))
    assert any("quantization" in note for note in imported.notes)


def test_prediction_layers_are_left_out_and_said() -> None:
    imported = import_config({**KIMI_K2, "num_nextn_predict_layers": 1})
    assert imported.spec.num_layers == 61
    assert any("1 multi-token prediction layer" in note for note in imported.notes)
    assert "1 multi-token prediction layer" in imported.spec.source


def test_qwen25_ignores_a_window_that_is_not_in_use() -> None:
    assert same_model(model_from_hf_config(QWEN25), load_model("qwen25_32b"))


def test_a_window_in_use_begins_at_its_layer() -> None:
    spec = model_from_hf_config({**QWEN25, "use_sliding_window": True, "max_window_layers": 60})
    assert [spec.sliding_window(i) for i in (0, 59, 60, 63)] == [None, None, 131072, 131072]
    kinds = ["full_attention"] * 62 + ["sliding_attention"] * 2
    spec = model_from_hf_config({**QWEN25, "use_sliding_window": True, "layer_types": kinds})
    assert [spec.sliding_window(i) for i in (61, 62)] == [None, 131072]


def test_layer_kinds_in_another_order_are_refused() -> None:
    kinds = ["sliding_attention", "full_attention"] * 32
    assert "layer_types" in problems({**QWEN25, "use_sliding_window": True, "layer_types": kinds})
    assert "layer_types" in problems({**QWEN25, "layer_types": ["linear_attention"] * 64})


def test_gpt2_has_biases_and_its_dropout_is_said() -> None:
    imported = import_config(GPT2)
    spec = imported.spec
    assert isinstance(spec.attention, GqaAttention)
    assert (spec.attention.bias, spec.attention.o_bias, spec.mlp.bias) == (True, True, True)
    assert (spec.norm, spec.positions, spec.tied_embeddings) == ("layer_norm", "learned", True)
    assert spec.mlp.intermediate_size == 3072
    assert sum("dropout" in note for note in imported.notes) == 3


def test_llama_defaults_are_those_of_transformers() -> None:
    spec = model_from_hf_config(LLAMA)
    attn = spec.attention
    assert isinstance(attn, GqaAttention)
    assert (attn.num_kv_heads, attn.head_dim, attn.bias) == (4, 16, False)
    assert attn.rope is not None
    assert attn.rope.theta == 10_000
    assert not spec.tied_embeddings


@pytest.mark.parametrize("layout", ["rope_scaling", "rope_parameters"])
def test_rope_scalings_in_both_layouts(layout: str) -> None:
    def scaling(**fields: Any) -> Any:
        config = {**LLAMA, "rope_theta": 7.0, layout: fields}
        if layout == "rope_parameters":
            del config["rope_theta"]
            fields["rope_theta"] = 7.0
        attn = model_from_hf_config(config).attention
        assert isinstance(attn, GqaAttention)
        assert attn.rope is not None
        assert attn.rope.theta == 7.0
        return attn.rope.scaling

    original = {"original_max_position_embeddings": 8192}
    assert scaling(rope_type="default") is None
    assert scaling(type="linear", factor=2) == LinearScaling(kind="linear", factor=2)
    assert scaling(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **original
    ) == Llama3Scaling(
        kind="llama3", factor=8, original_max_seq_len=8192, low_freq_factor=1, high_freq_factor=4
    )
    assert scaling(rope_type="yarn", factor=4.0, **original) == YarnScaling(
        factor=4, original_max_seq_len=8192
    )


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"type": "dynamic", "factor": 2.0}, "rope_scaling.type"),
        ({"rope_type": "longrope", "factor": 2.0}, "rope_scaling.rope_type"),
        ({"type": "linear"}, "rope_scaling.factor"),
        ({"type": "linear", "factor": 2.0, "short_factor": [1.0]}, "rope_scaling.short_factor"),
        (
            {
                "type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 8,
                "mscale_all_dim": 1.0,
            },
            "rope_scaling.mscale_all_dim",
        ),
        (
            {
                "type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 8,
                "attention_factor": 1.5,
            },
            "rope_scaling.attention_factor",
        ),
        (
            {
                "type": "llama3",
                "factor": 2.0,
                "original_max_position_embeddings": 8,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
            },
            "rope_scaling.low_freq_factor",
        ),
        ({"type": "default", "partial_rotary_factor": 0.5}, "rope_scaling.partial_rotary_factor"),
    ],
)
def test_what_a_rope_cannot_be_is_refused_by_name(scaling: dict[str, Any], field: str) -> None:
    assert field in problems({**LLAMA, "rope_scaling": scaling})


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"qk_layernorm": True}, "qk_layernorm", "true"),
        ({"attention_bias": True}, "attention_bias", "true"),
        ({"moe_layer_freq": 2}, "moe_layer_freq", "2"),
        ({"scoring_func": "softmax"}, "scoring_func", "softmax"),
        ({"topk_method": "greedy"}, "topk_method", "greedy"),
        ({"num_key_value_heads": 8}, "num_key_value_heads", "8"),
        ({"rope_interleave": False}, "rope_interleave", "false"),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
        ({"head_dim": 128}, "head_dim", "128"),
        ({"hidden_size": "7168"}, "hidden_size", "7168"),
        ({"hidden_size": True}, "hidden_size", "true"),
        ({"hidden_size": 0}, "hidden_size", "0"),
        ({"routed_scaling_factor": -1.0}, "routed_scaling_factor", "-1.0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob", "1"),
        ({"attention_dropout": 1.5}, "attention_dropout", "1.5"),
        ({"kv_lora_rank": None}, "kv_lora_rank", "missing"),
        ({"rope_scaling": [1]}, "rope_scaling", "[1]"),
    ],
)
def test_a_field_that_cannot_be_represented_is_named_with_its_value(
    change: dict[str, Any], field: str, value: str
) -> None:
    found = problems({**KIMI_K2, **change})
    assert list(found) == [field]
    assert value in found[field]


def test_every_problem_is_reported_at_once_and_a_slip_gets_a_hint() -> None:
    found = problems({**LLAMA, "mlp_bais": True, "rms_norm_eps": "x", "hidden_act": "relu"})
    assert found.keys() == {"mlp_bais", "rms_norm_eps", "hidden_act"}
    assert "mlp_bias" in found["mlp_bais"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
    ],
)
def test_qwen3_moe_layouts_that_do_not_exist_here(change: dict[str, Any], field: str) -> None:
    config = {**hf_config(load_model("qwen3_30b_a3b")), **change}
    assert list(problems(config)) == [field]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"activation_function": "gelu"}, "activation_function"),
        ({"n_ctx": 512}, "n_ctx"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"n_head": 7}, "n_head"),
    ],
)
def test_gpt2_variants_that_do_not_exist_here(change: dict[str, Any], field: str) -> None:
    assert list(problems({**GPT2, **change})) == [field]


@pytest.mark.parametrize(
    ("config", "value"),
    [
        ({"model_type": "mamba2"}, "mamba2"),
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"model_type": ["llama"]}, "llama"),
        ({}, "None"),
    ],
)
def test_an_unknown_architecture_is_named(config: dict[str, Any], value: str) -> None:
    assert value in " ".join(problems(config).values())


@pytest.mark.parametrize("text", ["", "[]", "{", "nul", "[" * 100_000, '{"a": 1e999}'])
def test_broken_json_ends_with_the_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"config\.json|model_type|architectures"):
        model_from_hf_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere"):
        model_from_hf_config(tmp_path / "nowhere" / "config.json")


def test_the_name_comes_from_the_folder_or_the_config(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert model_from_hf_config(folder).name == "my-model"
    assert model_from_hf_config({**LLAMA, "_name_or_path": "/a/b/c/"}).name == "c"
    assert model_from_hf_config(LLAMA).name == "llama"


# Families that are priced and have no reader or writer of their config.json yet.
PRICED_ONLY = {"nemotron", "qwen3_5", "qwen3_5_moe"}
CATALOG = {name: load_model(name) for name in catalog_names(MODEL_CATALOG)}
# A config.json cannot say multi-token prediction (refused by name).
SAID = [n for n, m in CATALOG.items() if not m.mtp_layers and m.family not in PRICED_ONLY]


@pytest.mark.parametrize("name", SAID)
def test_every_catalog_model_goes_to_a_config_and_back(name: str) -> None:
    spec = load_model(name)
    config = json.loads(json.dumps(hf_config(spec)))
    back = import_config(config)
    assert not back.notes
    skip = {"name", "source", "moe"}
    assert back.spec.model_dump(exclude=skip) == spec.model_dump(exclude=skip)
    assert back.spec.moe == spec.moe


@pytest.mark.parametrize("family", sorted(PRICED_ONLY))
def test_a_family_that_is_only_priced_is_refused_by_name(family: str) -> None:
    spec = next(m for m in CATALOG.values() if m.family == family)
    with pytest.raises(InputError, match=f"family.*{family}.*no config.json layout"):
        hf_config(spec)


@pytest.mark.parametrize(
    ("family", "change", "field"),
    [
        ("llama31_8b", {"qk_norm": True}, "attention.qk_norm"),
        ("llama31_8b", {"bias": True}, "attention.o_bias"),
        ("llama31_8b", {"sliding_window": 64}, "attention.sliding_window"),
        ("qwen25_32b", {"bias": False}, "attention.bias"),
        ("qwen3_30b_a3b", {"sliding_window": 64, "first_window_layer": 2}, "first_window_layer"),
        ("mixtral_8x7b", {"o_bias": True}, "attention.o_bias"),
        ("gpt3_175b", {"num_kv_heads": 8}, "attention.num_kv_heads"),
    ],
)
def test_a_trait_that_the_family_cannot_say_is_refused(
    family: str, change: dict[str, Any], field: str
) -> None:
    spec = load_model(family)
    odd = spec.model_copy(update={"attention": spec.attention.model_copy(update=change)})
    with pytest.raises(InputError, match=field):
        hf_config(odd)


def test_wrong_kinds_for_a_family_are_refused() -> None:
    llama, k2 = load_model("llama2_7b"), load_model("kimi_k2")
    assert isinstance(k2.attention, MlaAttention)
    for spec in (
        llama.model_copy(update={"family": "no_such"}),
        llama.model_copy(update={"family": "deepseek_v3"}),
        llama.model_copy(update={"family": "mixtral"}),
        llama.model_copy(update={"attention": k2.attention}),
        llama.model_copy(update={"norm": "layer_norm"}),
        k2.model_copy(update={"tied_embeddings": True, "positions": "learned"}),
        llama.model_copy(update={"moe": k2.moe}),
    ):
        with pytest.raises(InputError):
            hf_config(spec)


def test_configs_need_no_torch() -> None:
    blocked = ("torch", "safetensors", "transformers")
    program = (
        "import sys\n"
        f"for name in {blocked!r}:\n    sys.modules[name] = None\n"
        "from flopwright.models.hf.config_out import hf_config\n"
        "from flopwright.models.hf.names import stored_tensors\n"
        "from flopwright.models.hf.header import read_header\n"
        "from flopwright.spec.load import load_model\n"
        "spec = load_model('kimi_k2')\n"
        "print(len(hf_config(spec)), sum(s.numel for s in stored_tensors(spec)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[1] == "1026408232448"
