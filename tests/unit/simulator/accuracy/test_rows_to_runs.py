"""Rows to runs: plans, batches, shards, repeats, flags; and nothing broken is an exception."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.simulator.accuracy.rows import COLUMNS
from flopwright.simulator.accuracy.run_of_row import PublishedRun, PublishedRuns, published_runs
from flopwright.simulator.accuracy.run_of_row_axes import light_ends
from flopwright.simulator.accuracy.run_of_row_flags import odd_rows
from flopwright.simulator.accuracy.run_of_row_merge import source_family
from flopwright.spec.scenario import Scenario

LLAMA = {
    "id": "x-1-step_time", "source": "a/b:c.md", "year": "2025", "model": "Llama3-8B",
    "seq": "8192", "gpu": "H100-80GB", "n_gpus": "64", "tp": "2", "pp": "1", "cp": "1",
    "mbs": "1", "gbs": "128", "recompute": "none", "precision": "BF16",
    "framework": "NeMo/Megatron-Core", "metric": "step_time", "value": "4.0", "unit": "s",
}  # fmt: skip


def table(folder: Path, *rows: dict[str, str]) -> Path:
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def runs(folder: Path, *changes: dict[str, str]) -> PublishedRuns:
    rows = [LLAMA | {"id": f"x-{i}-step_time"} | c for i, c in enumerate(changes)]
    return published_runs(table(folder, *rows))


def one(folder: Path, **change: str) -> PublishedRun:
    found = runs(folder, change)
    assert not found.skipped
    return found.runs[0]


def test_a_full_row_is_the_run_it_says(tmp_path: Path) -> None:
    run = one(tmp_path)
    assert (run.plan.tp, run.plan.pp, run.plan.dp, run.plan.micro_batch_size) == (2, 1, 32, 1)
    assert run.scenario.workload.global_batch_size == 128
    assert run.measured_step_s == 4.0
    assert run.cell == "a/b | llama38b | h100_sxm"
    assert run.stack.label() == "nemo-2025-dense"
    assert run.plan.sequence_parallel
    assert run.plan.zero_stage == 1
    assert run.in_overall
    assert "sequence parallelism on" in run.assumed
    assert not plan_violations(run.plan, run.scenario)


# 64 GPUs, 128 sequences of 8,192 tokens in 4 s: 262,144 tokens/s, 4,096 a GPU, 32 sequences/s.
@pytest.mark.parametrize(
    ("metric", "value"),
    [("tokens_per_s", "262144"), ("tokens_per_s_per_gpu", "4096"), ("samples_per_s", "32")],
)
def test_rates_give_the_same_step(tmp_path: Path, metric: str, value: str) -> None:
    run = one(tmp_path, id=f"x-1-{metric}", metric=metric, value=value, unit="")
    assert run.measured_step_s == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "TPU v5e"}, "out of scope"),
        ({"gpu": "V100"}, "out of scope"),
        ({"metric": "mfu", "value": "40", "id": "x-0-mfu"}, "out of scope"),
        ({"gpu": "Cray-1"}, "no such processor"),
        ({"model": "unheard of"}, "what shape"),
        ({"n_gpus": "63"}, "no multiple"),
        ({"n_gpus": ""}, "number of GPUs"),
        ({"tp": "3", "n_gpus": "48"}, "heads"),
        ({"gbs": "", "mbs": ""}, "without its batch"),
        ({"seq": ""}, "without its sequence length"),
        ({"pp": "64", "n_gpus": "128", "tp": "1"}, "layers"),
        ({"value": "nan"}, "no positive number"),
    ],
)
def test_what_cannot_be_used_is_skipped_with_its_reason(
    tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    found = runs(tmp_path, change)
    assert found.runs == ()
    assert len(found.skipped) == 1
    assert reason in found.skipped[0][1]


@pytest.mark.parametrize(
    ("cell", "stage", "shard", "replicas", "library"),
    [
        ("ZeRO-1", 1, 32, 1, "deepspeed"),
        ("ZeRO-2", 2, 32, 1, "deepspeed"),
        ("DDP+dist-opt (FSDP=0)", 1, 32, 1, "deepspeed"),
        ("none", 0, 32, 1, "deepspeed"),
        ("1", 1, 32, 1, "deepspeed"),
        ("FSDP2=8", 3, 8, 4, "fsdp2"),
        ("FSDP shard=16", 3, 16, 2, "fsdp2"),
        ("FSDP FULL_SHARD", 3, 32, 1, "fsdp2"),
        ("HSDP", 3, 4, 8, "fsdp2"),
        ("ZeRO-1 within 8 GPUs", 1, 4, 8, "deepspeed"),
        ("FSDP=16 + DP", 3, 16, 2, "fsdp2"),
    ],
)
def test_shards(
    tmp_path: Path, cell: str, stage: int, shard: int, replicas: int, library: str
) -> None:
    plan = one(tmp_path, zero_or_fsdp=cell).plan
    assert (plan.zero_stage, plan.dp_shard, plan.dp_replicate) == (stage, shard, replicas)
    assert plan.data_parallel == library


@pytest.mark.parametrize(
    ("cell", "policy", "tags"),
    [
        ("full", "full", ()),
        ("full (per layer)", "full", ()),
        ("none", "none", ()),
        ("selective: mlp, core_attn", "selective", ("core_attn", "mlp")),
        ("selective (attention core)", "selective", ("core_attn",)),
        ("selective", "selective", ("core_attn",)),
        ("", "none", ()),
    ],
)
def test_recompute(tmp_path: Path, cell: str, policy: str, tags: tuple[str, ...]) -> None:
    plan = one(tmp_path, recompute=cell).plan
    assert plan.recompute == policy
    assert set(plan.recompute_tags) == set(tags)


@pytest.mark.parametrize(
    ("cell", "compute", "gemm"),
    [
        ("BF16", "bf16", "same"), ("bf16", "bf16", "same"), ("BF16 (AMP)", "bf16", "same"),
        ("FP16", "fp16", "same"), ("FP16/BF16", "bf16", "same"), ("FP8", "bf16", "fp8_tensor"),
        ("FP8-CS", "bf16", "fp8_tensor"), ("FP8 rowwise", "bf16", "fp8_tensor"),
        ("FP8 blockwise e4m3", "bf16", "fp8_block"), ("MXFP8", "bf16", "mxfp8"),
        ("FP8-MX", "bf16", "mxfp8"), ("NVFP4 (mixed)", "bf16", "nvfp4"), ("", "bf16", "same"),
    ],
)  # fmt: skip
def test_precision(tmp_path: Path, cell: str, compute: str, gemm: str) -> None:
    precision = one(tmp_path, precision=cell).scenario.workload.precision
    assert (precision.compute, precision.gemm) == (compute, gemm)


@pytest.mark.parametrize(
    ("change", "rank"),
    [
        ({"model": "Llama2-70B (LoRA r16)", "n_gpus": "8"}, 16),
        ({"model": "Llama2-70B LoRA", "n_gpus": "8"}, 16),
        ({"notes": "LoRA; rank 32; MFU"}, 32),
        ({"notes": "NeMo container 26.06; lora; fine-tuning run"}, 16),
        ({"id": "dgxc-llama8b-lora-8-step_time"}, 16),
        ({"notes": "ladder, step: +packed; LoRA/QLoRA steps replace parameters"}, None),
        ({"notes": "ladder, step: QLoRA; LoRA/QLoRA steps replace parameters"}, 16),
        ({"notes": "SFT"}, None),
    ],
)
def test_adapters(tmp_path: Path, change: dict[str, str], rank: int | None) -> None:
    run = one(tmp_path, **change)
    assert run.scenario.workload.lora_rank == rank
    assert ("lora" in run.flags) == (rank is not None)


def test_frozen_weights_are_narrow_and_kimi_is_trained_by_muon(tmp_path: Path) -> None:
    lora = {"model": "Llama2-70B (LoRA r16)", "precision": "FP8", "n_gpus": "8"}
    mlperf = one(tmp_path, source="mlcommons/training_results_v5.0:X/results/y", **lora)
    assert mlperf.scenario.workload.precision.frozen_weights == "fp8"
    assert one(tmp_path, **lora).scenario.workload.precision.frozen_weights is None
    kimi = one(tmp_path, model="Kimi-K2", ep="32", tp="1")
    assert kimi.scenario.workload.optimizer.kind == "muon"
    assert kimi.stack.family == "moe"


def test_batches_that_do_not_divide_are_rounded_or_made_smaller(tmp_path: Path) -> None:
    rounded = one(tmp_path, gbs="2046")
    assert rounded.scenario.workload.global_batch_size == 2048
    assert "gbs-rounded" in rounded.flags
    assert one(tmp_path, mbs="8").plan.micro_batch_size == 4  # 128 over 32 ranks
    alone = one(tmp_path, gbs="", metric="tokens_per_s", id="x-1-tokens_per_s", unit="", mbs="12")
    assert alone.scenario.workload.global_batch_size == 12 * 32
    assert "assumed-batch" in alone.flags


def test_interleaving_needs_whole_rounds_and_layers(tmp_path: Path) -> None:
    plan = one(tmp_path, pp="4", vpp="4", n_gpus="64").plan
    assert (plan.vpp, plan.schedule) == (4, "interleaved_1f1b")
    odd = one(tmp_path, pp="4", vpp="4", n_gpus="64", gbs="40")
    assert (odd.plan.vpp, odd.plan.schedule) == (1, "1f1b")
    assert any("no multiple of pp" in words for words in odd.assumed)
    assert one(tmp_path, pp="4", vpp="16").plan.vpp == 8  # 32 layers


# Llama 3.1 405B: 126 layers, an embedding and a head over 16 chunks of 8.
@pytest.mark.parametrize(
    ("layers", "mtp", "chunks", "expected"),
    [
        (126, 0, 16, (7, *(8,) * 14, 7)),
        (61, 1, 16, (3, *(4,) * 14, 2)),
        (94, 0, 8, (11, *(12,) * 6, 11)),
        (32, 0, 8, None),
        (61, 0, 1, None),
        (31, 0, 4, (8, 8, 8, 7)),
    ],
)
def test_ends_of_a_pipeline_are_light(
    layers: int, mtp: int, chunks: int, expected: tuple[int, ...] | None
) -> None:
    found = light_ends(layers, mtp, chunks)
    assert found == expected
    assert found is None or sum(found) == layers


def test_repeats_are_one_run_and_others_are_not(tmp_path: Path) -> None:
    release = "NeMo container 26.0{}; pretrain"
    bridge = {"framework": "Megatron-Bridge/MCore"}
    same = runs(
        tmp_path,
        bridge | {"notes": release.format(2), "value": "4.0"},
        bridge | {"notes": release.format(4), "value": "5.0"},
        bridge | {"notes": "NeMo container 26.04.01; pretrain", "value": "4.2"},
    )
    assert len(same.runs) == 1
    assert same.runs[0].measured_step_s == 4.2
    assert len(same.runs[0].row_ids) == 3
    assert "merged" in same.runs[0].flags
    other = runs(
        tmp_path,
        bridge | {"notes": release.format(2), "value": "4.0"},
        bridge | {"notes": release.format(6), "value": "3.0"},  # another era
        {"notes": "overlap off", "value": "4.0"},
        {"notes": "overlap on", "value": "3.5"},
        {"notes": "overlap on", "value": "3.5", "gbs": "256"},
        {"notes": "a copy elsewhere", "value": "3.5", "source": "a/b@v2:d.md"},
    )
    assert len(other.runs) == 5  # the copied value is one with "overlap on"


def test_a_run_in_a_headline_has_nothing_against_it(tmp_path: Path) -> None:
    apart = {
        "vtrain-single": {"source": "github.com/x/vTrain data/ground_truth_single.csv"},
        "own-plan": {"tp": ""},
        "tp-across-nodes": {"tp": "16", "gbs": "128"},
        "unaligned": {"model": "GPT-200B", "hidden": "14400", "layers": "8", "heads": "120",
                      "tp": "8"},
    }  # fmt: skip
    for flag, change in apart.items():
        run = one(tmp_path, **change)
        assert flag in run.flags
        assert not run.in_overall
    assert "tp-across-nodes" not in one(tmp_path, tp="8").flags  # a whole node
    assert "tp-across-nodes" not in one(tmp_path, tp="16", gpu="GB200").flags
    assert "amd" in one(tmp_path, gpu="MI300X").flags
    assert one(tmp_path, gpu="MI300X").in_overall
    assert "reduced-layers" in one(tmp_path, layers="4").flags


def test_the_planner_fills_a_row_that_lacks_its_plan(tmp_path: Path) -> None:
    asked: list[dict[str, int]] = []

    def plan_for(scenario: Scenario, known: object) -> ParallelPlan:
        asked.append(dict(known))  # type: ignore[call-overload]
        return ParallelPlan(tp=4, dp_shard=16, zero_stage=1, micro_batch_size=2)

    found = published_runs(table(tmp_path, LLAMA | {"tp": "", "mbs": ""}), plan_for)
    assert asked == [{"pp": 1, "cp": 1}]
    assert found.runs[0].plan.tp == 4
    assert "own-plan" in found.runs[0].flags
    assert found.runs[0].plan.recompute == "none"
    full = published_runs(table(tmp_path, LLAMA | {"tp": "", "recompute": "full"}), plan_for)
    assert full.runs[0].plan.recompute == "full"
    published_runs(table(tmp_path, LLAMA), plan_for)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ("mlcommons/training_results_v5.0:Dell/results/x", "mlcommons/training_results"),
        ("mlcommons/training_results_v4.1:NVIDIA/results/y", "mlcommons/training_results"),
        ("NVIDIA-NeMo/Megatron-Bridge:docs/performance-summary.md", "nvidia-nemo/megatron-bridge"),
        ("NVIDIA/dgxc-benchmarking@v24.11.1:grok1/README.md", "nvidia/dgxc-benchmarking"),
        ("arXiv:2402.15627 Table 2", "arxiv:2402.15627"),
        ("github.com/VIA-Research/vTrain data/ground_truth_single.csv", "via-research/vtrain"),
        ("docs.nvidia.com/nemo-framework/user-guide (25.02)", "docs.nvidia.com/nemo-framework"),
    ],
)
def test_a_source_is_who_published_it(source: str, family: str) -> None:
    from flopwright.simulator.accuracy.rows import Configuration

    assert source_family(Configuration("r-1", {"source": source}, (), "")) == family


def test_odd_rows_have_reasons() -> None:
    assert all(reason.strip() for reason in odd_rows().values())


CELLS = st.one_of(
    st.sampled_from(
        ["", "0", "-1", "1", "2", "3", "8", "1e9", "nan", "inf", "none", "x", "1.5", "FSDP2=7",
         "selective: ?", "NVFP4", "2**70", str(2**70), "€", "a,b", "true", "H100", "MI300X",
         "GPT-OSS-120B", "Llama3-8B", "LoRA", "Megatron", "tokens/s", "peak_mem_gb"]
    ),
    st.text(max_size=12),
)  # fmt: skip


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    changes=st.lists(
        st.dictionaries(st.sampled_from(COLUMNS), CELLS, max_size=6), min_size=1, max_size=3
    )
)
def test_no_cell_is_ever_an_exception(tmp_path: Path, changes: list[dict[str, str]]) -> None:
    rows = [LLAMA | {"id": f"x-{i}-step_time"} | c for i, c in enumerate(changes)]
    found = published_runs(table(tmp_path, *rows))
    seen = sum(len(r.row_ids) for r in found.runs) + len(found.skipped)
    assert seen <= len(rows)
    for run in found.runs:
        assert not plan_violations(run.plan, run.scenario)
        assert run.measured_step_s is None or 0 < run.measured_step_s < float("inf")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    body=st.binary(max_size=200),
    head=st.sampled_from([b"", b"metric,value\n", b"id,metric,value,gpu\n"]),
)
def test_no_file_is_ever_another_exception(tmp_path: Path, body: bytes, head: bytes) -> None:
    path = tmp_path / "any.csv"
    path.write_bytes(head + body)
    try:
        found = published_runs(path)
    except InputError:
        return
    assert all(reason for _, reason in found.skipped)


def test_a_table_may_lack_nearly_all_columns(tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    path.write_text(
        "id,model,gpu,n_gpus,gbs,seq,metric,value\n"
        "a-step_time,Llama3-8B,H200,8,64,4096,step_time,5.5\n"
        "b-step_time,Llama3-8B,H200,8,64,4096,tokens_per_s,9000\n"
    )
    found = published_runs(path)
    assert [r.id for r in found.runs] == ["a", "b-step_time"]
    first = found.runs[0]
    assert "own-plan" in first.flags
    assert first.stack.label() == "other-undated-dense"
    assert first.measured_step_s == 5.5
    assert found.runs[1].measured_step_s == pytest.approx(64 * 4096 / 9000)
