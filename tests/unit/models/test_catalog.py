"""The catalog's models have the sizes that their reports, or counts of their code, give."""

from __future__ import annotations

import pytest
import torch

from flopwright.models.transformer.module import build_stage
from flopwright.spec.cache import sequence_cache_bytes
from flopwright.spec.load import MODEL_CATALOG, catalog_names, load_model
from flopwright.spec.parameters import num_active_params, num_params, parameters

# Exact counts from the models' own configs, checked on transformers' meta device there.
TOTALS = {
    "deepseek_v3": 671_026_419_200,
    "kimi_k2": 1_026_408_232_448,
    "moonlight_16b_a3b": 15_960_110_208,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
    "llama31_405b": 405_853_388_800,
    "qwen25_32b": 32_763_876_352,
    "qwen3_8b": 8_190_735_360,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_630_071_296,
    "kimi_k2_thinking": 1_026_408_232_448,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
}

# Billions that touch a token: without the input embedding, and with both tables.
ACTIVE = {
    "deepseek_v3": (36.63, 37.55),
    "kimi_k2": (31.69, 32.86),
    "moonlight_16b_a3b": (2.58, 2.91),
    "qwen3_30b_a3b": (3.04, None),
    "qwen3_235b_a22b": (21.57, None),
    "mixtral_8x7b": (12.75, None),
    "mixtral_8x22b": (38.96, None),
    "glm45": (32.86, None),
    "minimax_m2": (10.42, None),
    "gpt_oss_20b": (3.61, None),
    "gpt_oss_120b": (5.13, None),
    "glm45_air": (12.80, None),
}

# Billions printed beside the shapes, to the last digit printed.
PRINTED = {
    "nemotron4_340b": "341",  # arXiv 2406.11704: 331.6 besides 9.4 of embeddings
    "gpt_h2304_l24": "1.7",  # arXiv 2104.04473, table 1
    "gpt_h3072_l30": "3.6",
    "gpt_h4096_l36": "7.5",
    "gpt_h6144_l40": "18.4",
    "gpt_h8192_l48": "39.1",
    "gpt_h10240_l60": "76.1",
    "gpt_h12288_l80": "145.6",
    "gpt_h16384_l96": "310.1",
    "gpt_h20480_l105": "529.6",
    "gpt_h25600_l128": "1008.0",
    "gpt_h6144_l48": "22",  # arXiv 2205.05198, table 3
    "gpt_h12288_l96": "175",
    "gpt_h4096_l30_v131k": "7.1",  # README of Megatron-LM
    "gpt_h6144_l32_v131k": "16",
    "gpt_h7168_l48_v131k": "32",
    "gpt_h8192_l84_v131k": "70",
    "gpt_h10240_l92_v131k": "119",
    "gpt_h12288_l96_v131k": "177",
    "gpt_h16384_l96_v131k": "314",
    "gpt_h18432_l112_v131k": "462",
    "gpt_h14336_l70_a112_v251k": "176",  # BLOOM's sizing trials
    "gpt_h12288_l96_a96_v251k": "177",
    "gpt_h13312_l82_a104_v251k": "178",
    "gpt_h14336_l72_a64_v251k": "181",
    "gpt_h13824_l78_a96_v251k": "182",
    "gpt_h13312_l94_a128_v251k": "203",
    "gpt_h14336_l82_a128_v251k": "206",
}


@pytest.mark.parametrize("name", TOTALS)
def test_totals_to_the_last_integer(name: str) -> None:
    assert num_params(load_model(name)) == TOTALS[name]


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("glm45", 352_797_814_784),
        ("glm45_air", 106_852_245_504),
        ("minimax_m2", 228_689_748_992),
    ],
)
def test_totals_without_the_selection_bias(name: str, published: int) -> None:
    assert sum(p.numel for p in parameters(load_model(name)) if p.trainable) == published


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters(name: str) -> None:
    spec, (without, both) = load_model(name), ACTIVE[name]
    assert round(num_active_params(spec) / 1e9, 2) == without
    if both is not None:
        assert round(num_active_params(spec, input_embedding=True) / 1e9, 2) == both


def test_a_dense_model_is_active_but_for_its_input_embedding() -> None:
    for name in ("llama31_8b", "llama31_70b", "llama31_405b", "qwen3_8b", "qwen25_32b"):
        spec = load_model(name)
        table = spec.vocab_size * spec.hidden_size
        assert num_active_params(spec) == num_params(spec) - table
        assert num_active_params(spec, input_embedding=True) == num_params(spec)


def test_moonlight_without_both_tables() -> None:
    spec = load_model("moonlight_16b_a3b")
    tables = 2 * spec.vocab_size * spec.hidden_size
    assert round(num_active_params(spec, head=False) / 1e9, 2) == 2.24
    assert round((num_params(spec) - tables) / 1e9, 2) == 15.29


def test_gpt3_weights_without_biases() -> None:
    spec = load_model("gpt3_175b")
    weights = sum(p.numel for p in parameters(spec) if not p.name.endswith(".bias"))
    assert round(weights / 1e9, 2) == 174.59


@pytest.mark.parametrize("name", PRINTED)
def test_gpt_sizes_as_printed(name: str) -> None:
    digits = len(PRINTED[name].partition(".")[2])
    printed = float(PRINTED[name])
    found = num_params(load_model(name)) / 1e9
    assert abs(found - printed) <= 0.5 * 10**-digits + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in catalog_names(MODEL_CATALOG) if n.startswith("gpt_h")]
)
def test_gpt_sizes_by_the_formula_of_the_megatron_paper(name: str) -> None:
    spec = load_model(name)
    layers, h, v, s = spec.num_layers, spec.hidden_size, spec.vocab_size, spec.max_seq_len
    # arXiv 2104.04473, equation 2: 12 l h^2 (1 + 13 / 12h + (V + s) / 12lh), and what it
    # leaves out: the last norm, and a head of its own.
    formula = 12 * layers * h**2 + 13 * layers * h + (v + s) * h
    assert num_params(spec) == formula + 2 * h + (0 if spec.tied_embeddings else v * h)


@pytest.mark.parametrize("name", catalog_names(MODEL_CATALOG))
def test_files_are_named_and_sourced_and_the_modules_hold_these_tensors(name: str) -> None:
    spec = load_model(name)
    assert spec.name == name
    assert len(spec.source) > 10
    # Two layers stand for all of a kind: the first one, and the last one with its experts.
    layers = [-1, 0, spec.num_layers - 1, spec.num_layers]
    stage = build_stage(spec, layers, device="meta", dtype=torch.bfloat16)
    held = {n: tuple(t.shape) for n, t in (*stage.named_parameters(), *stage.named_buffers())}
    listed = {p.name: p.shape for p in parameters(spec) if p.layer in layers and not p.tied}
    assert held == listed


@pytest.mark.parametrize(
    ("name", "value_bytes_per_token"),
    [("kimi_k2", 70_272), ("deepseek_v3", 70_272), ("llama31_405b", 516_096)],
)
def test_cache_bytes_a_token(name: str, value_bytes_per_token: int) -> None:
    # DeepSeek-V3's 70 KB and Llama-3.1-405B's 516 KB: arXiv 2505.09343, table 1.
    assert sequence_cache_bytes(load_model(name), 1000) == 1000 * value_bytes_per_token
