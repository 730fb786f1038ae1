"""The software stack of a row: family, era, graphs, also of sources never seen."""

from __future__ import annotations

import pytest

from flopwright.simulator.accuracy.rows import Configuration
from flopwright.simulator.accuracy.stack_of_row import StackKey, framework_of, stack_of


def row(identity: str = "r-1", notes: str = "", **cells: str) -> Configuration:
    return Configuration(id=identity, cells=cells, metrics=(), notes=notes)


@pytest.mark.parametrize(
    ("framework", "source", "family"),
    [
        ("Megatron-Bridge/MCore", "", "megatron_bridge"),
        ("NeMo/Megatron-Core", "", "nemo"),
        ("NVIDIA NeMo Framework Release 25.04", "", "nemo"),
        ("NVIDIA NeMo Framework Release 25.04", "mlcommons/training_results_v5.0:X", "mlperf"),
        ("NeMo-AutoModel (PyTorch)", "", "automodel"),
        ("Megatron-LM", "", "megatron"),
        ("Megatron-Core 0.9", "", "megatron"),
        ("Megatron-DeepSpeed", "", "megatron_deepspeed"),
        ("DeepSpeed 0.14.2 + HF Trainer", "", "deepspeed"),
        ("PyTorch FSDP (fms-fsdp)", "", "fsdp"),
        ("FSDP2 + torch.compile", "somebody/new", "fsdp"),
        ("KempnerForge", "", "fsdp"),
        ("torchtitan", "", "torchtitan"),
        ("", "pytorch/torchtitan:benchmarks/x.md", "torchtitan"),
        ("MaxText (JAX)", "", "jax"),
        ("InternEvo", "", "internevo"),
        ("LLM Foundry/Composer FSDP", "", "llm_foundry"),
        ("MegaScale", "", "megatron"),
        ("ROCm 6.4, PyTorch 2.6", "", "rocm"),
        ("something else", "", "other"),
        ("", "", "other"),
    ],
)
def test_family(framework: str, source: str, family: str) -> None:
    assert framework_of(row(framework=framework, source=source)) == family


@pytest.mark.parametrize(
    ("notes", "era"),
    [
        ("NeMo container 25.09; pretrain; tokendrop", "25.09"),
        ("NeMo container 25.11; pretrain", "25.11"),
        ("NeMo container 26.04.01; pretrain", "25.11"),
        ("NeMo container 26.06; pretrain", "26.06"),
        ("NeMo container 27.02", "26.06"),
        ("no release", "25.11"),
    ],
)
def test_era_of_a_bridge_release(notes: str, era: str) -> None:
    found = stack_of(row(framework="Megatron-Bridge/MCore", notes=notes), True, "h100_sxm")
    assert found == StackKey("megatron_bridge", era, "moe", False)


def test_era_of_others() -> None:
    assert stack_of(row(framework="NeMo/Megatron-Core", year="2024"), False, "b200").era == "2024"
    assert stack_of(row(framework="NeMo/Megatron-Core"), False, "b200").era == "undated"
    old = row(framework="Megatron-LM (2021)", year="2021")
    assert stack_of(old, False, "a100_sxm_80gb").era == "unfused"
    assert stack_of(row(framework="Megatron-LM", year="2025"), False, "b200").era == "fused"
    eager = row("titan-8b-8-eager", framework="torchtitan")
    assert stack_of(eager, False, "h100_sxm").era == "eager"
    assert stack_of(row(framework="torchtitan"), False, "h100_sxm").era == "compiled"


def test_graphs() -> None:
    def graphs(notes: str, gpu: str, moe: bool = True) -> bool:
        bridge = row(framework="Megatron-Bridge/MCore", notes=notes)
        return stack_of(bridge, moe, gpu).graphs

    assert graphs("NeMo container 26.02", "gb200")
    assert not graphs("NeMo container 26.02", "h100_sxm")
    assert not graphs("NeMo container 26.02", "gb200", moe=False)
    assert not graphs("NeMo container 25.09; tokendrop", "gb200")
    assert graphs("full CUDA graphs", "h100_sxm")
    assert not graphs("without CUDA graphs; NeMo container 26.02", "gb200")
    assert not graphs("TE CUDA graphs on moe_router, moe_preprocess", "h100_sxm")


def test_a_key_reads_as_one_word_and_is_hashable() -> None:
    key = StackKey("nemo", "2025", "dense", True)
    assert key.label() == "nemo-2025-dense-graphs"
    assert len({key, StackKey("nemo", "2025", "dense", True)}) == 1
