"""Models of rows: sizes by name, by columns, by the stated total; checked by their counts."""

from __future__ import annotations

import pytest

from flopwright.errors import InputError
from flopwright.simulator.accuracy.model_of_row import model_family, model_of
from flopwright.simulator.accuracy.rows import Configuration, Metric
from flopwright.spec.flops import model_flops_per_token
from flopwright.spec.model import MlaAttention
from flopwright.spec.parameters import num_active_params, num_params


def row(model: str, metrics: tuple[Metric, ...] = (), **cells: str) -> Configuration:
    return Configuration(id="r-1", cells={"model": model, **cells}, metrics=metrics, notes="")


# Totals as the models' reports and cards give them, in billions.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama3-8B", 8.03), ("Llama3.1-70B", 70.55), ("Llama3.1-405B", 405.85),
        ("Llama3.2-3B", 3.21), ("Llama3.2-1B", 1.24), ("Llama2-7B SFT", 6.74),
        ("Llama2-13B LoRA", 13.02), ("Llama2-70B (LoRA r16)", 68.98), ("LLaMA-65B", 65.29),
        ("CodeLlama-34B", 33.74), ("Mistral-7B", 7.24), ("Mixtral-8x7B", 46.70),
        ("Mixtral-8x22B", 140.63), ("DeepSeek-V3", 671.03), ("DeepSeek-V2", 235.74),
        ("DeepSeek-Coder-V2-Lite", 15.71), ("Kimi-K2", 1026.41), ("Moonlight-16B-A3B", 15.96),
        ("Qwen2.5-7B", 7.62), ("Qwen2.5-32B", 32.76), ("Qwen2.5-72B", 72.71),
        ("Qwen2-57B-A14B", 57.41), ("Qwen3-8B", 8.19), ("Qwen3-14B", 14.77),
        ("Qwen3-32B", 32.76), ("Qwen3-30B-A3B", 30.53), ("Qwen3-235B-A22B", 235.09),
        ("GPT-OSS-20B", 20.91), ("GPT-OSS-120B", 116.83), ("GPT3-175B", 174.6),
        ("Nemotron4-15B", 15.6), ("Nemotron4-340B", 341.0), ("MPT-7b", 6.65),
        ("MPT-30b", 29.97), ("OPT-175B", 174.6), ("Falcon-40B", 41.3), ("GLM-4.5-Air", 106.85),
        ("MiniMax-M2", 228.69), ("Grok-1", 314.0), ("Llama4-Scout", 107.8), ("InternLM-7B", 7.32),
    ],
)  # fmt: skip
def test_a_name_gives_the_size_that_its_report_counts(name: str, billions: float) -> None:
    spec = model_of(row(name), 2048).spec
    assert num_params(spec) / 1e9 == pytest.approx(billions, rel=0.012)


def test_columns_win_over_the_name_and_a_clash_ends_it() -> None:
    cut = model_of(row("llama3-405b (cut to 4 layers)", layers="4", kv_heads="16"), 4096)
    assert cut.spec.num_layers == 4
    assert cut.full_layers == 126
    assert cut.is_reduced
    assert cut.spec.attention.num_heads == 128
    assert getattr(cut.spec.attention, "num_kv_heads", 0) == 16
    other = model_of(row("GPT-175B", hidden="8192", layers="24", heads="64"), 2048)
    assert other.spec.hidden_size == 8192
    assert not other.is_reduced


def test_head_widths_that_are_not_hidden_over_heads() -> None:
    for name, width in (("Qwen3-30B-A3B", 128), ("GPT-OSS-20B", 64), ("Grok-1", 128)):
        assert model_of(row(name), 4096).spec.attention.qk_head_dim == width
    assert isinstance(model_of(row("DeepSeek-V3"), 4096).spec.attention, MlaAttention)


@pytest.mark.parametrize(
    ("name", "kind", "bias", "tied"),
    [
        ("GPT3-175B", "gelu", True, True),
        ("Nemotron4-15B", "gelu", False, False),
        ("MPT-7b", "gelu", False, True),
        ("Llama3-8B", "swiglu", False, False),
    ],
)
def test_the_block_of_a_family(name: str, kind: str, bias: bool, tied: bool) -> None:
    spec = model_of(row(name), 2048).spec
    assert (spec.mlp.kind, spec.mlp.bias, spec.tied_embeddings) == (kind, bias, tied)


def test_a_gated_test_model_says_so_in_its_name() -> None:
    cells = {"hidden": "512", "layers": "12", "heads": "8", "kv_heads": "8"}
    assert model_of(row("GPT test swiglu", **cells), 1024).spec.mlp.kind == "swiglu"
    cells["ffn"] = "2048"
    assert model_of(row("GPT test", **cells), 1024).spec.mlp.kind == "gelu"


# 195e9 / (12 * 14400^2) = 78.4 layers: 77 is the multiple of 11 stages nearest to it.
def test_layers_follow_from_the_size_and_heads_from_the_tensor_ranks() -> None:
    cells = {"params_total_b": "195", "hidden": "14400", "tp": "8", "pp": "11"}
    found = model_of(row("GPT-195B (BLOOM sizing)", **cells), 2048)
    assert found.spec.num_layers == 77
    assert found.spec.attention.num_heads % 8 == 0
    assert num_params(found.spec) / 1e9 == pytest.approx(195, rel=0.01)
    assert any("12 * layers" in words for words in found.assumed)


@pytest.mark.parametrize(("stated", "modules"), [(260.0, 1), (249.6, 0), (None, 0)])
def test_stated_flops_of_a_token_tell_whether_there_is_an_mtp_module(
    stated: float | None, modules: int
) -> None:
    metrics = [Metric("r-1-a", "tokens_per_s_per_gpu", 5000.0)]
    if stated is not None:
        metrics.append(Metric("r-1-b", "model_tflops_per_gpu", stated * 5000 / 1e3))
    spec = model_of(row("DeepSeek-V3", tuple(metrics)), 4096).spec
    assert spec.mtp_layers == modules
    counted = model_flops_per_token(spec, 4096) / 1e9
    assert counted == pytest.approx(260.0 if modules else 249.6, rel=0.005)


def test_active_parameters_of_experts() -> None:
    spec = model_of(row("Qwen3-30B-A3B"), 4096).spec
    assert num_active_params(spec) / 1e9 == pytest.approx(3.04, rel=0.02)


# 2.2e9 parameters of 6 idle experts in each of 24 layers, 3 matrices of 2048 wide: 2,487.
def test_an_expert_is_as_wide_as_total_and_active_sizes_leave_it() -> None:
    cells = {"hidden": "2048", "layers": "24", "heads": "16", "kv_heads": "4", "experts": "8",
             "topk": "2"}  # fmt: skip
    found = model_of(row("MoE 4B-A1.8B", **cells), 2048).spec
    assert found.moe is not None
    assert found.moe.expert_intermediate_size == 2432
    assert num_params(found) - num_active_params(found) == pytest.approx(2.2e9, rel=0.05)
    stated = row("MoE E=8", params_total_b="4", params_active_b="1.8", **cells)
    again = model_of(stated, 2048).spec.moe
    assert again == found.moe


def test_a_cut_model_whose_width_is_the_experts_has_no_dense_layers() -> None:
    cut = model_of(row("deepseekv3 (cut to 4 layers)", layers="4", ffn="2048"), 4096).spec
    assert cut.moe is not None
    assert cut.moe.first_dense_layers == 0
    whole = model_of(row("DeepSeek-V3", ffn="18432"), 4096).spec
    assert whole.moe is not None
    assert whole.moe.first_dense_layers == 3


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("Llama3-8B", "Llama3.1-8B"),
        ("Llama3.1-405B proxy (7 layers)", "Llama3.1-405B"),
        ("llama3-70b (cut to 12 layers)", "Llama3-70B"),
        ("Llama2-7B SFT", "Llama2-7B"),
        ("GPT h2048 L20", "GPT h2048 L12"),
        ("GPT-195B (BLOOM sizing)", "GPT-181B (BLOOM sizing)"),
        ("Grok-1 proxy (4 layers)", "Grok-1"),
    ],
)
def test_spellings_and_depths_are_one_family(a: str, b: str) -> None:
    assert model_family(a) == model_family(b)


def test_different_models_are_different_families() -> None:
    names = ("Llama3-8B", "Llama3-70B", "Llama2-7B", "Qwen3-30B-A3B", "Qwen3-235B-A22B",
             "GPT h1024 L12", "GPT h2048 L12", "MPT-7b", "MPT-1b", "GPT3-175B")  # fmt: skip
    assert len({model_family(n) for n in names}) == len(names)


@pytest.mark.parametrize(
    ("name", "cells", "rule"),
    [
        ("Nemotron-3-Nano", {}, "hybrid"),
        ("a model nobody named", {}, "what shape it has"),
        ("a model", {"hidden": "4096"}, "number of layers"),
    ],
)
def test_what_cannot_be_modelled_is_refused_by_name(
    name: str, cells: dict[str, str], rule: str
) -> None:
    with pytest.raises(InputError, match=rule):
        model_of(row(name, **cells), 2048)
