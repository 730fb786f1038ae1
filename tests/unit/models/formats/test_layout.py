"""Which weights a format covers, by names, in every family; and what config.json says."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flopwright.errors import InputError
from flopwright.models.formats.layout import LAYOUTS, LayoutName, layout_for, role_of
from flopwright.models.formats.plan import projections
from flopwright.models.formats.quantization_config import (
    find,
    layout_of,
    quantization_config,
    with_format,
)
from flopwright.models.hf.names import stored_tensors
from flopwright.spec.formats import release_bytes
from flopwright.spec.load import load_model
from flopwright.spec.parameters import parameters

MODELS = (
    "deepseek_v3", "kimi_k2", "kimi_k2_mini", "moonlight_16b_a3b", "kimi_k3_mini",
    "kimi_linear_mini", "kimi_k2_thinking", "glm45_air", "minimax_m2",
    "qwen3_30b_a3b", "mixtral_8x7b", "llama31_8b", "qwen3_8b", "gpt_oss_20b",
)  # fmt: skip
COVERED = {"attention", "mlp", "expert", "shared_expert"}


@pytest.mark.parametrize("model", MODELS)
def test_roles_by_name_are_those_of_the_parameter_list(model: str) -> None:
    spec = load_model(model)
    some = sorted({-1, 0, 1, min(3, spec.num_layers - 1), spec.num_layers - 1, spec.num_layers})
    roles = {p.name: p.role for p in parameters(spec)}
    for stored in stored_tensors(spec, some):
        role = roles[stored.parts[0].name]
        found = role_of(stored.name, stored.shape)
        if stored.name.endswith("bias"):
            assert found is None, stored.name
        elif stored.stacked:
            assert found == role, stored.name
        elif len(stored.shape) == 2 and min(stored.shape) > 1:
            wanted = role if role in COVERED | {"router", "latent"} else None
            assert found == wanted, stored.name
        else:
            assert layout_for(LAYOUTS["block_fp8"], stored.name, stored.shape) is None


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.61.eh_proj.weight", (64, 128)),
        ("model.layers.61.shared_head.head.weight", (64, 64)),
        ("model.embed_tokens.weight", (64, 64)),
        ("lm_head.weight", (64, 64)),
        ("vision_tower.encoder.layers.0.mlp.up_proj.weight", (64, 64)),
        ("vision_tower.encoder.blocks.0.self_attn.q_proj.weight", (64, 64)),
        ("mm_projector.proj.0.weight", (64, 64)),
        ("model.layers.3.self_attn.q_conv1d.weight", (64, 1, 4)),
        ("model.layers.3.mlp.experts.gate_up_proj_bias", (8, 64)),
        ("model.layers.3.self_attn.sinks", (64,)),
    ],
)
def test_what_no_format_touches(name: str, shape: tuple[int, ...]) -> None:
    assert all(layout_for(layout, name, shape) is None for layout in LAYOUTS.values())


def test_prediction_layers_are_covered_as_the_others() -> None:
    layer, fp8 = "model.layers.61", LAYOUTS["block_fp8"]
    for name in ("self_attn.o_proj", "mlp.experts.255.up_proj", "mlp.shared_experts.down_proj"):
        assert layout_for(fp8, f"{layer}.{name}.weight", (64, 64)) is fp8


@pytest.mark.parametrize("layout", [LAYOUTS["int4_g32"], LAYOUTS["mxfp4"]])
@pytest.mark.parametrize("model", ["kimi_k2_mini", "kimi_k3_mini", "kimi_linear_mini"])
def test_ignored_patterns_are_what_is_not_quantised(layout: Any, model: str) -> None:
    spec = load_model(model)
    ignored = quantization_config(layout)["ignore"]

    def matches(module: str) -> bool:
        regexes = [p[3:] for p in ignored if p.startswith("re:")]
        return module in ignored or any(re.match(r, module) for r in regexes)

    for stored in stored_tensors(spec):
        if len(stored.shape) == 2 and not stored.name.endswith("embed_tokens.weight"):
            module = stored.name.removesuffix(".weight").removeprefix("language_model.")
            quantised = layout_for(layout, stored.name, stored.shape) is not None
            assert matches(module) != quantised, module


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_config_names_its_layout(name: LayoutName) -> None:
    said = quantization_config(LAYOUTS[name])
    assert layout_of(with_format({"a": 1, "text_config": {}}, said)) is LAYOUTS[name]
    nested = {"text_config": {"quantization_config": said, "b": 2}}
    assert layout_of(nested) is LAYOUTS[name]
    assert with_format(nested, None) == {"text_config": {"b": 2}}
    assert find(with_format(nested, None)) is None


def test_what_block_fp8_leaves_alone_is_named() -> None:
    kept = projections([("a.routed_expert_up_proj.weight", (4, 4)), ("a.gate.weight", (4, 4))])
    assert kept == ("a.routed_expert_up_proj",)
    said = quantization_config(LAYOUTS["block_fp8"], kept)
    assert said["modules_to_not_convert"] == ["lm_head", *kept]
    assert "modules_to_not_convert" not in quantization_config(LAYOUTS["block_fp8"])


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quant_method": "awq"}, "awq.*limit: fp8, mxfp4, compressed-tensors"),
        ({}, "quant_method.*None"),
        ({"quant_method": "fp8"}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [1, 128]}, "other scales"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "0 groups"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"g": {}},
            },
            "nvfp4-pack-quantized.*limit: pack-quantized",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 8}}},
            },
            "num_bits.*only 4",
        ),
    ],
)
def test_formats_that_are_not_known(said: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        layout_of({"quantization_config": said})


def test_closed_forms_are_the_layouts_bytes() -> None:
    spec = load_model("kimi_k2_mini")
    for layout in (LAYOUTS[n] for n in ("block_fp8", "int4_g32", "mxfp4")):
        total = shapes = 0
        for stored in stored_tensors(spec):
            chosen = layout_for(layout, stored.name, stored.shape)
            total += 2 * stored.numel if chosen is None else layout.nbytes(stored.shape)
            shapes += 16 * (chosen is not None and layout.name == "int4_g32")
        assert total - shapes == release_bytes(spec, layout.format)
