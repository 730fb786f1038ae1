"""The same run as other sources would write it: spellings of parts, models, plans and formats."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from flopwright.simulator.accuracy.gpu_names import canonical_gpu
from flopwright.simulator.accuracy.model_of_row import model_of
from flopwright.simulator.accuracy.model_of_row_names import shape_of_size, size_of_name
from flopwright.simulator.accuracy.rows import COLUMNS, Configuration
from flopwright.simulator.accuracy.run_of_row import PublishedRun, PublishedRuns, published_runs
from flopwright.spec.parameters import num_params

RUN = {
    "id": "x-1-step_time", "source": "a/b:c.md", "year": "2025", "model": "Llama3-8B",
    "seq": "8192", "gpu": "H100-80GB", "n_gpus": "64", "tp": "2", "pp": "1", "cp": "1",
    "mbs": "1", "gbs": "128", "recompute": "none", "precision": "BF16",
    "framework": "NeMo/Megatron-Core", "metric": "step_time", "value": "4.0", "unit": "s",
}  # fmt: skip


def read(folder: Path, *changes: dict[str, str]) -> PublishedRuns:
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(RUN | {"id": f"x-{i}-step_time"} | c for i, c in enumerate(changes))
    return published_runs(path)


def one(folder: Path, **change: str) -> PublishedRun:
    found = read(folder, change)
    assert not found.skipped
    return found.runs[0]


# Sizes in billions as the models' reports and cards count them.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama/Llama-3.1-70B", 70.55), ("llama-405b", 405.85), ("LLaMA-33B", 32.53),
        ("Code Llama 34B", 33.74), ("OLMo-2 32B", 32.23), ("OLMo-7B", 6.89), ("Phi-4", 14.66),
        ("OLMoE-1B-7B", 6.92), ("Falcon-180B", 178.7), ("Gemma-2-2B", 2.61),
        ("Gemma3-27B", 27.0), ("GLM-130B", 130.0), ("GLM-4-9B", 9.4), ("ChatGLM3-6B", 6.24),
        ("Mistral-Nemo-12B", 12.25), ("Mistral Small 24B", 23.57), ("Mistral Large 123B", 122.6),
        ("DeepSeek-67B", 67.4), ("deepseek-llm-7b", 6.91), ("DeepSeek-MoE-16B", 16.38),
        ("DeepSeek-R1-Distill-Qwen-7B", 7.62), ("DeepSeek-R1-Distill-Llama-70B", 70.55),
        ("DeepSeek-R1", 671.03), ("Qwen-7B", 7.72), ("Qwen1.5-110B", 111.2),
        ("Qwen3-Coder-480B-A35B", 480.2), ("InternLM2-20B", 19.86), ("InternLM2-7B", 7.74),
        ("OPT-6.7B", 6.66), ("OPT-66B", 65.7), ("bloom-7b1", 7.07), ("GPT-NeoX-20B", 20.55),
        ("GPT-3 13B", 12.85), ("GPT-3 1.3B", 1.32), ("gpt2", 0.124), ("Pythia-1.4B", 1.41),
        ("Pythia-12B", 11.85), ("PaLM-540B", 540.3), ("StarCoder2-15B", 15.96),
        ("TinyLlama-1.1B", 1.1), ("Apertus-70B", 70.6), ("MT-NLG 530B", 529.6),
        ("Megatron-1T", 1008.0), ("Yi-6B", 6.06), ("Command R+", 103.8),
    ],
)  # fmt: skip
def test_models_by_name(name: str, billions: float) -> None:
    spec = model_of(Configuration("r", {"model": name}, (), ""), 2048).spec
    assert num_params(spec) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3.1-70B", 70.0), ("bloom-7b1", 7.1), ("OPT-125M", 0.125), ("GPT-1T", 1000.0),
        ("gpt530b", 530.0), ("Mixtral-8x7B", None), ("Qwen3-30B-A3B", 30.0), ("DeepSeek-V3", None),
        ("Llama-4-Maverick-17B-128E", None), ("GPT h1024 L20", None), ("OLMoE-1B-7B", 7.0),
    ],
)  # fmt: skip
def test_sizes_in_names(name: str, billions: float | None) -> None:
    assert size_of_name(name) == billions


@pytest.mark.parametrize("billions", [0.5, 1.3, 3.0, 7.0, 13.0, 34.0, 70.0, 175.0, 530.0])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_model_of_which_only_the_size_is_known_has_that_size(billions: float, pp: int) -> None:
    cells = {"model": "new", "params_total_b": str(billions), "pp": str(pp)}
    found = model_of(Configuration("r", cells, (), ""), 2048)
    assert num_params(found.spec) / 1e9 == pytest.approx(billions, rel=0.06)
    assert any("a usual shape" in words for words in found.assumed)
    assert shape_of_size(billions, pp)[1] % pp == 0


def test_the_stated_size_tells_a_gated_block_from_a_plain_one() -> None:
    cells = {"model": "new", "hidden": "4096", "layers": "32", "kv_heads": "8", "heads": "32"}
    cells |= {"vocab": "256000"}
    gated = model_of(Configuration("r", cells | {"params_total_b": "7.5"}, (), ""), 2048).spec
    plain = model_of(Configuration("r", cells | {"params_total_b": "7.74"}, (), ""), 2048).spec
    assert gated.mlp.kind == "swiglu"
    assert num_params(plain) / 1e9 == pytest.approx(7.74, rel=0.05)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_sxm"), ("H100 SXM5", "h100_sxm"),
        ("8xA100-80G", "a100_sxm_80gb"), ("DGX-A100 640GB", "a100_sxm_80gb"),
        ("A100 40G", "a100_sxm_40gb"), ("p4de.24xlarge", "a100_sxm_80gb"),
        ("p4d.24xlarge", "a100_sxm_40gb"), ("p5.48xlarge", "h100_sxm"), ("p5en", "h200_sxm"),
        ("a3-megagpu-8g", "h100_sxm"), ("ND96amsr_A100_v4", "a100_sxm_80gb"),
        ("GB200 NVL72", "gb200"), ("H20-96GB", "h20"), ("Grace Hopper", "gh200"),
        ("A100/H100", None), ("mixed H100 + H20", None), ("A40", None), ("GPU", None),
    ],
)  # fmt: skip
def test_gpus(spelling: str, name: str | None) -> None:
    assert canonical_gpu(spelling) == name


@pytest.mark.parametrize(
    ("cell", "compute", "gemm"),
    [
        ("bfloat16", "bf16", "same"), ("torch.bfloat16", "bf16", "same"),
        ("bf16-mixed", "bf16", "same"), ("float16", "fp16", "same"), ("half", "fp16", "same"),
        ("float8", "bf16", "fp8_tensor"), ("FP8 delayed", "bf16", "fp8_tensor"),
        ("FP8 sub-channel", "bf16", "fp8_block"), ("e4m3 1x128", "bf16", "fp8_block"),
        ("mxfp8", "bf16", "mxfp8"), ("float32", "fp32", "same"),
    ],
)  # fmt: skip
def test_precisions(tmp_path: Path, cell: str, compute: str, gemm: str) -> None:
    precision = one(tmp_path, precision=cell).scenario.workload.precision
    assert (precision.compute, precision.gemm) == (compute, gemm)


def test_a_format_without_cost_is_skipped_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    found = read(tmp_path, {"precision": "tf32"})
    assert "TF32" in found.skipped[0][1]
    run = one(tmp_path, precision="posit16")
    assert any("'posit16'" in words for words in run.assumed)


@pytest.mark.parametrize(
    ("cell", "policy", "tags"),
    [
        ("full activation checkpointing", "full", ()), ("True", "full", ()), ("1", "full", ()),
        ("Full AC", "full", ()), ("gradient checkpointing", "full", ()), ("no", "none", ()),
        ("False", "none", ()), ("0", "none", ()), ("disabled", "none", ()),
        ("selective-core-attn", "selective", ("core_attn",)),
        ("core-attn", "selective", ("core_attn",)),
    ],
)  # fmt: skip
def test_recompute(tmp_path: Path, cell: str, policy: str, tags: tuple[str, ...]) -> None:
    plan = one(tmp_path, recompute=cell).plan
    assert (plan.recompute, plan.recompute_tags) == (policy, tags)


def test_frameworks_that_recompute_unless_told_otherwise(tmp_path: Path) -> None:
    assert one(tmp_path, framework="GPT-NeoX", recompute="").plan.recompute == "full"
    assert one(tmp_path, framework="GPT-NeoX", recompute="no").plan.recompute == "none"
    assert one(tmp_path, framework="HF Trainer", recompute="").plan.recompute == "none"


def test_every_second_layer_and_a_word_that_says_nothing(tmp_path: Path) -> None:
    assert one(tmp_path, recompute="1 layer in 2").plan.recompute_layers == 16
    run = one(tmp_path, recompute="banana")
    assert any("'banana'" in words for words in run.assumed)


@pytest.mark.parametrize(
    ("cell", "stage", "shard", "library"),
    [
        ("ZeRO stage 3", 3, 32, "deepspeed"),
        ("zero_2", 2, 32, "deepspeed"),
        ("zero1", 1, 32, "deepspeed"),
        ("FULL_SHARD", 3, 32, "fsdp2"),
        ("SHARD_GRAD_OP", 2, 32, "fsdp2"),
        ("NO_SHARD", 0, 32, "deepspeed"),
        ("distributed optimizer", 1, 32, "deepspeed"),
        ("DDP", 0, 32, "deepspeed"),
        ("FSDP2 HSDP 8x4", 3, 8, "fsdp2"),
        ("HSDP 2x16", 3, 16, "fsdp2"),
    ],
)
def test_shards(tmp_path: Path, cell: str, stage: int, shard: int, library: str) -> None:
    plan = one(tmp_path, zero_or_fsdp=cell).plan
    assert (plan.zero_stage, plan.dp_shard, plan.data_parallel) == (stage, shard, library)


def test_offload_may_stand_with_the_sharding(tmp_path: Path) -> None:
    plan = one(tmp_path, zero_or_fsdp="zero3-offload").plan
    assert plan.zero_stage == 3
    assert plan.optimizer_offload


def test_an_unstated_split_of_a_sharded_framework_is_data_parallel(tmp_path: Path) -> None:
    run = one(tmp_path, framework="LLaMA-Factory", tp="", pp="")
    assert (run.plan.tp, run.plan.pp, run.plan.dp, run.plan.zero_stage) == (1, 1, 64, 3)
    few = one(tmp_path, framework="LLaMA-Factory", tp="", pp="", gbs="32")
    assert (few.plan.tp, few.plan.dp) == (2, 32)


@pytest.mark.parametrize(
    ("change", "batch", "seq", "gpus"),
    [
        ({"seq": "8K"}, 128, 8192, 64), ({"gbs": "1M tokens"}, 128, 8192, 64),
        ({"n_gpus": "64 (8 nodes)"}, 128, 8192, 64), ({"gbs": "~128"}, 128, 8192, 64),
        ({"n_gpus": "", "gpu": "8xH100-80G"}, 128, 8192, 8),
    ],
)  # fmt: skip
def test_sizes(tmp_path: Path, change: dict[str, str], batch: int, seq: int, gpus: int) -> None:
    run = one(tmp_path, **change)
    work = run.scenario.workload
    assert (work.global_batch_size, work.seq_len, run.num_gpus) == (batch, seq, gpus)


@pytest.mark.parametrize("column", ["n_gpus", "tp", "pp", "mbs", "gbs", "seq"])
@pytest.mark.parametrize("text", ["many", "3.5", "1e300", "2-4", "-8"])
def test_a_needed_size_that_is_no_number_is_never_replaced(
    tmp_path: Path, column: str, text: str
) -> None:
    found = read(tmp_path, {column: text})
    assert found.runs == ()
    assert column in found.skipped[0][1]


def test_a_rate_of_one_gpu_under_the_name_of_a_jobs(tmp_path: Path) -> None:
    # 128 x 8,192 tokens at 4,096 tokens/s of each of 64 GPUs.
    run = one(
        tmp_path, metric="tokens_per_s", id="x-1-tokens_per_s", value="4,096", unit="tok/s/GPU"
    )
    assert run.measured_step_s == pytest.approx(4.0)


def test_a_step_beyond_the_peak_stands_apart(tmp_path: Path) -> None:
    run = one(tmp_path, value="4.0", unit="ms")
    assert "odd" in run.flags
    assert not run.in_overall
    assert any("peak" in words for words in run.assumed)


def test_frameworks_of_one_family_are_no_repeats_but_releases_of_one_are(tmp_path: Path) -> None:
    two = read(tmp_path, {"framework": "Megatron-LM"}, {"framework": "MegaScale", "value": "3"})
    assert sorted(r.measured_step_s or 0 for r in two.runs) == [3.0, 4.0]
    releases = read(
        tmp_path, {"framework": "NeMo 24.05"}, {"framework": "NeMo 24.07", "value": "3"}
    )
    assert [r.measured_step_s for r in releases.runs] == [3.5]


def test_nodes_of_four_superchips(tmp_path: Path) -> None:
    run = one(tmp_path, gpu="GH200", tp="4")
    assert run.scenario.cluster.node.gpus == 4
    assert "tp-across-nodes" not in run.flags
