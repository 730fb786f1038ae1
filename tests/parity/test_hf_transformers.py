"""Weights and shapes against `transformers`: nothing of it was written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flopwright.models.hf.config import import_config, model_from_hf_config
from flopwright.models.hf.config_out import hf_config
from flopwright.models.hf.families import FAMILIES
from flopwright.models.hf.safetensors_io import load_stage_, save_stage
from flopwright.models.transformer.module import Stage, build_stage, init_weights_
from flopwright.spec.load import MODEL_CATALOG, catalog_names, load_model
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import num_params

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
DEEPSEEK = {
    **LLAMA,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
    "rope_parameters": YARN,
}
GPT_OSS = {
    **LLAMA,
    "head_dim": 12,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "deepseek_v3_plain_query": ("DeepseekV3", {**DEEPSEEK, "q_lora_rank": None, "n_group": 1}),
    "llama": ("Llama", {**LLAMA, "rope_parameters": LLAMA3}),
    "llama_tied_biased": (
        "Llama",
        {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("Qwen2", {**LLAMA, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 12}),
    "qwen3_moe": ("Qwen3Moe", {**LLAMA, **MOE, "head_dim": 12, "mlp_only_layers": [0]}),
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 6, "sliding_window": 16}),
    "gpt_oss": ("GptOss", GPT_OSS),
    "gpt2": ("GPT2", GPT2),
    "gpt2_untied": ("GPT2", {**GPT2, "tie_word_embeddings": False, "n_inner": 48}),
}


def language_model(kind: str, fields: dict[str, Any]) -> Any:
    """Returns a transformers model with random weights, biases and selection biases."""
    torch.manual_seed(3)
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, head)(getattr(transformers, f"{kind}Config")(**fields))
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 1 or name.endswith("bias"):
            tensor.copy_(torch.randn(tensor.shape))
    return model


def all_layers(spec: ModelSpec) -> range:
    return range(-1, spec.num_layers + 1)


def tensors(stage: Stage) -> dict[str, Tensor]:
    return dict((*stage.named_parameters(), *stage.named_buffers()))


def theirs_under_our_names(kind: str, model: Any) -> dict[str, Tensor]:
    """Returns transformers' own tensors; GPT-2 and gpt-oss lay them out differently."""
    state: dict[str, Tensor] = dict(model.state_dict())
    if kind == "GptOss":
        return {n.replace(".router.", ".gate."): _gpt_oss(n, t) for n, t in state.items()}
    if kind != "GPT2":
        return state
    out = {}
    names = {
        "transformer.wte.": "model.embed_tokens.",
        "transformer.wpe.": "model.embed_positions.",
        "transformer.ln_f.": "model.norm.",
        "transformer.h.": "model.layers.",
        ".ln_1.": ".input_layernorm.",
        ".ln_2.": ".post_attention_layernorm.",
        ".attn.c_proj.": ".self_attn.o_proj.",
        ".mlp.c_fc.": ".mlp.up_proj.",
        ".mlp.c_proj.": ".mlp.down_proj.",
    }
    for name, tensor in state.items():
        linear = tensor.ndim == 2 and ".h." in name
        value = tensor.T if linear else tensor
        for a, b in names.items():
            name = name.replace(a, b)
        if ".attn.c_attn." in name:
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                out[name.replace(".attn.c_attn.", f".self_attn.{letter}_proj.")] = part
        else:
            out[name] = value
    return out


def _gpt_oss(name: str, tensor: Tensor) -> Tensor:
    """Returns experts as [out, in], gate rows above up rows."""
    if ".experts." in name and not name.endswith("_bias"):
        tensor = tensor.transpose(1, 2)
    return torch.cat((tensor[:, ::2], tensor[:, 1::2]), 1) if "gate_up_proj" in name else tensor


@pytest.mark.parametrize("case", CASES)
def test_weights_go_both_ways_bit_for_bit(case: str, tmp_path: Path) -> None:
    kind, fields = CASES[case]
    model = language_model(kind, fields)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1

    spec = model_from_hf_config(tmp_path / "theirs")
    stage = build_stage(spec, all_layers(spec))
    load_stage_(stage, tmp_path / "theirs")
    ours, theirs = tensors(stage), theirs_under_our_names(kind, model)
    assert theirs.keys() - ours.keys() <= {"lm_head.weight"}  # a tied head stands once in ours
    assert ours.keys() <= theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name

    save_stage(stage, tmp_path / "ours", max_shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    again, report = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    same = ("rope_parameters", "sliding_window", "layer_types", "head_dim", "tie_word_embeddings")
    for field in same:
        value = getattr(again.config, field, None)
        kept = getattr(model.config, field, None)
        if isinstance(kept, dict):
            # Defaults may be spelled out; what is there must agree.
            assert {k: value[k] for k in kept} == kept
        elif kept is not None:
            assert value == kept, field


def test_a_shrunk_k2_loads_in_transformers_and_back(tmp_path: Path) -> None:
    spec = load_model("kimi_k2").shrunk(hidden_size=128, num_layers=3, vocab_size=512)
    stage = build_stage(spec, all_layers(spec))
    init_weights_(stage, spec, seed=5)
    for block in stage.moe_blocks().values():
        bias = block.gate.e_score_correction_bias
        assert bias is not None
        bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(1)))
    save_stage(stage, tmp_path / "k2", max_shard_bytes=300_000)
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "k2")
    state, ours = model.state_dict(), tensors(stage)
    assert state.keys() == ours.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, ours[name]), name

    model.save_pretrained(tmp_path / "again", max_shard_size="300KB")
    back = import_config(tmp_path / "again").spec
    assert back == spec.model_copy(update={"name": back.name, "source": back.source})
    second = build_stage(spec, all_layers(spec))
    load_stage_(second, tmp_path / "again")
    for name, tensor in tensors(second).items():
        assert torch.equal(tensor, ours[name]), name


def test_bf16_weights_and_a_wide_selection_bias(tmp_path: Path) -> None:
    spec = load_model("kimi_k2_mini")
    stage = build_stage(spec, all_layers(spec), dtype=torch.bfloat16)
    init_weights_(stage, spec, seed=5)
    for block in stage.moe_blocks().values():
        assert block.gate.e_score_correction_bias is not None
        block.gate.e_score_correction_bias.fill_(0.001)  # not a bf16 number
    save_stage(stage, tmp_path / "k2")
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "k2")
    assert model.dtype == torch.bfloat16
    second = build_stage(spec, all_layers(spec), dtype=torch.bfloat16)
    load_stage_(second, tmp_path / "k2")
    for name, tensor in tensors(second).items():
        assert torch.equal(tensor, tensors(stage)[name]), name


@pytest.mark.parametrize(
    "kind",
    [
        "Llama",
        "Qwen2",
        "Qwen3",
        "Qwen3Moe",
        "Mixtral",
        "GPT2",
        "KimiLinear",
        "MiniMaxM2",
    ],
)
def test_every_field_that_transformers_writes_is_known(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")()
    spec = model_from_hf_config(json.loads(config.to_json_string(use_diff=False)), name="default")
    assert spec.num_layers == config.num_hidden_layers
    assert spec.hidden_size == config.hidden_size


# One head count a shape: sweeps over heads have equal counts.
MEASURED = [
    name
    for name in catalog_names(MODEL_CATALOG)
    if ("_v251k" not in name or "_a128" in name)
    and not load_model(name).mtp_layers
    and load_model(name).family in FAMILIES
    and load_model(name).family != "kimi_k3"  # transformers has no such model
]


@pytest.mark.parametrize("name", MEASURED)
def test_parameter_counts_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    spec = load_model(name)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(spec)))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = {id(p): p.numel() for p in model.parameters()}
    biases = sum(
        b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")
    )
    assert num_params(spec) == sum(counted.values()) + biases
