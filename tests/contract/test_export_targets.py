"""Exported files against their targets' own parsers, in the targets' own environments.

`.ci/targets.sh` makes the environments; FLOPWRIGHT_EXPORT_TARGETS names their folder.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from flopwright.errors import InputError
from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.planner.export.registry import TARGETS, target_files
from flopwright.spec.load import load_gpu, load_model, load_scenario, make_plan_file
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import Workload

IMAGE: Final = "registry.example/train:1"
CHECKER: Final = Path(__file__).parent / "targets" / "check_target.py"
Need = Callable[[str, bool, str], None]

# One plan a target that it can express in full or in part.
PLANS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "accelerate": ("llama31_70b", {"tp": 4, "dp_shard": 16, "zero_stage": 3}),
    "dstack": ("llama31_70b", {"tp": 4, "pp": 4, "dp_shard": 4, "zero_stage": 1}),
    "kubeflow": ("llama31_70b", {"tp": 4, "pp": 4, "dp_shard": 4, "zero_stage": 1}),
    "megatron": ("deepseek_v3", {"tp": 2, "pp": 4, "ep": 8, "dp_shard": 8, "zero_stage": 1}),
    "skypilot": ("llama31_70b", {"tp": 4, "pp": 4, "dp_shard": 4, "zero_stage": 1}),
    "torchtitan": ("deepseek_v3", {"ep": 8, "dp_shard": 64, "zero_stage": 3}),
    "verl": ("deepseek_v3", {"tp": 2, "pp": 4, "ep": 8, "dp_shard": 8, "zero_stage": 1}),
}

# Plans that take another way through an exporter.
MORE: Final[dict[str, tuple[tuple[str, dict[str, Any]], ...]]] = {
    "verl": (
        ("llama31_8b", {"dp_shard": 32, "cp": 2, "context_parallel": "ulysses", "zero_stage": 3}),
        ("llama31_70b", {"tp": 8, "pp": 4, "dp_shard": 2, "recompute": "none"}),
    ),
    "megatron": (("llama31_70b", {"tp": 8, "pp": 4, "dp_shard": 2, "recompute": "none"}),),
}

# Ten mistakes a target: (what stands there, what is written instead).
BROKEN: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "accelerate": (
        ("num_processes: 64", "num_processez: 64"),
        ("compute_environment: LOCAL_MACHINE", "compute_environment: MOON"),
        ("distributed_type: DEEPSPEED", "distributed_type: DEEPSPEEED"),
        ("rdzv_backend", "rendezvous_backend"),
        ("machine_rank: 0", "machine_number: 0"),
        ("deepspeed_config:", "deepspeed_settings:"),
        ("use_cpu: false", "use_cpus: false"),
        ("num_machines: 8", "num_machines: 8\nmixed_precison: bf16"),
        ("debug: false", "debug: ["),
        ("same_network: true", "same_net: true"),
    ),
    "dstack": (
        ("nodes: 8", "nodez: 8"),
        ("nodes: 8", "nodes: eight"),
        ("nodes: 8", "nodes: 0"),
        ("gpu: H100:8", "gpu: H100:x8"),
        ("gpu: H100:8", "gpus: H100:8"),
        ("type: task", "type: tusk"),
        ("commands:", "comands:"),
        ("env:\n", "env: 3\nenvs:\n"),
        (f"image: {IMAGE}", f"image: {IMAGE}\npython: '2.7'"),
        ("nodes: 8", "nodes: -1"),
    ),
    "kubeflow": (
        ("numNodes: 8", "numNodez: 8"),
        ("numNodes: 8", "numNodes: eight"),
        ("numProcPerNode: 8", "numProcPerNode: auto"),
        ("kind: TrainJob", "kind: TrainJobs"),
        ("apiVersion: trainer.kubeflow.org/v1alpha1", "apiVersion: trainer.kubeflow.org/v2"),
        ("runtimeRef:", "runtimeReference:"),
        ("name: trial", "name: Trial Run"),
        ("resourcesPerNode:", "resources:"),
        ("command:\n", "command: torchrun\n    commands:\n"),
        ("args:\n", "arguments:\n"),
    ),
    "megatron": (
        ("--num-layers 61", "--num-layerz 61"),
        ("--num-layers 61", "--num-layers 62"),
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 3"),
        ("--recompute-granularity full", "--recompute-granularity fullest"),
        ("--recompute-method uniform", "--recompute-method unifrom"),
        ("--moe-token-dispatcher-type alltoall", "--moe-token-dispatch alltoall"),
        ("--num-experts 256", "--num-experts 255"),
        ("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 5"),
        ("tttt|", "ttt|"),
        ("--kv-lora-rank", "--kv-lora"),
    ),
    "skypilot": (
        ("num_nodes: 8", "num_nodez: 8"),
        ("num_nodes: 8", "num_nodes: eight"),
        ("num_nodes: 8", "num_nodes: 0"),
        ("accelerators: H100:8", "accelerators: H100:eight"),
        ("accelerators: H100:8", "acelerators: H100:8"),
        ("network_tier: best", "network_tier: bestest"),
        ("resources:", "resource:"),
        ("envs:", "environment:"),
        ("run: |", "runs: |"),
        ("setup: |", "set_up: |"),
    ),
    "torchtitan": (
        ("seq_len = 4096", "seq_length = 4096"),
        ("data_parallel_replicate_degree = 1", "data_parallel_replicate_degree = 2"),
        ('name = "deepseek_v3"', 'name = "deepseek_v9"'),
        ('flavor = "671B"', 'flavor = "672B"'),
        ("[parallelism]", "[paralelism]"),
        ("data_parallel_shard_degree = 64", "data_parallel_shard_degree = 63"),
        ("tensor_parallel_degree = 1", "tensor_parallel_degree = 3"),
        ("[metrics]", "[metric]"),
        ("[training]", "[training"),
        ("steps = ", "step = "),
    ),
    "verl": (
        ("trainer.nnodes=8", "trainer.nnodez=8"),
        ("trainer.nnodes=8", "trainer.nnodes=eight"),
        ("data.train_batch_size=256", "data.train_batch_size=255"),
        ("model_engine=megatron", "model_engine=megatrons"),
        ("ppo_mini_batch_size=256", "ppo_mini_batch_size=512"),
        ("ppo_mini_batch_size=256", "ppo_mini_batch_size=100"),
        ("actor.ppo_micro_batch_size_per_gpu", "actor.ppo_micro_batch_size_per_rank"),
        ("tensor_model_parallel_size=2", "tensor_model_parallel_size=3"),
        ("pipeline_model_parallel_layout", "pipeline_model_parallel_layouts"),
        ("optim.lr=", "optim.learning_rate="),
    ),
}


def _scenario(model: str) -> Scenario:
    cluster = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16").cluster
    node = cluster.node.model_copy(update={"gpu": load_gpu("h100_sxm")})
    return Scenario(
        name="trial",
        model=load_model(model),
        cluster=cluster.model_copy(update={"node": node, "num_nodes": 8}),
        workload=Workload.model_validate(
            {"seq_len": 4096, "global_batch_size": 256, "total_tokens": "100B"}
        ),
    )


def _plan(model: str, **axes: Any) -> PlanFile:
    scenario = _scenario(model)
    parallel = ParallelPlan.model_validate({"recompute": "full", **axes})
    assert not plan_violations(parallel, scenario)
    return make_plan_file(scenario, parallel, "trial")


def _text(target: str, plan: tuple[str, dict[str, Any]] | None = None) -> tuple[str, str]:
    model, axes = plan or PLANS[target]
    (file,) = target_files(_plan(model, **axes), [target], image=IMAGE)
    return file.name, file.text


@pytest.fixture
def parser(need_service: Need, tmp_path: Path) -> Callable[[str, dict[str, str]], dict[str, str]]:
    """Returns (target, text by file name) -> what its parser says against each, "" for nothing."""
    folder = os.environ.get("FLOPWRIGHT_EXPORT_TARGETS", "")

    def check(target: str, texts: dict[str, str]) -> dict[str, str]:
        python = Path(folder) / target / "bin" / "python"
        how = ". .ci/targets.sh, which sets FLOPWRIGHT_EXPORT_TARGETS"
        need_service(f"the parser of {target}", bool(folder) and python.exists(), how)
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
        done = subprocess.run(
            [str(python), str(CHECKER), target, *texts],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        answers: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return answers

    return check


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_the_targets_own_parser_accepts_the_file_and_refuses_mistakes(
    target: str, parser: Callable[[str, dict[str, str]], dict[str, str]]
) -> None:
    name, text = _text(target)
    texts = {name: text}
    for i, (there, instead) in enumerate(BROKEN[target]):
        assert there in text, there
        texts[f"broken{i}{Path(name).suffix}"] = text.replace(there, instead, 1)
    good = {name} | {f"more{i}{Path(name).suffix}" for i in range(len(MORE.get(target, ())))}
    for i, plan in enumerate(MORE.get(target, ())):
        texts[f"more{i}{Path(name).suffix}"] = _text(target, plan)[1]
    words = parser(target, texts)
    assert {words[file] for file in good} == {""}
    missed = [BROKEN[target][i] for i in range(10) if not list(words.values())[i + 1]]
    assert not missed


def test_every_target_has_ten_mistakes_to_find() -> None:
    assert {k: len(v) for k, v in BROKEN.items()} == dict.fromkeys(TARGETS, 10)


def test_what_cannot_be_expressed_is_an_error_with_every_reason() -> None:
    plan = _plan("mixtral_8x7b", pp=4, ep=8, dp_shard=16, zero_stage=1)
    with pytest.raises(InputError) as error:
        target_files(plan, ["torchtitan", "accelerate", "dstack", "torchtitn"])
    fields = {v.field for v in error.value.violations}
    assert {"model", "parallel.pp", "parallel.zero_stage", "image", "target"} <= fields


def test_what_a_target_leaves_out_stands_in_the_file() -> None:
    plan = make_plan_file(
        load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16"),
        ParallelPlan(pp=16, ep=16, dp_shard=128, zero_stage=1, fp8_activations=True),
        "k2",
    )
    (file,) = target_files(plan, ["megatron"])
    assert any("Muon" in text for text in file.omitted)
    assert any("FP8 storage" in text for text in file.omitted)
    for text in file.omitted:
        assert f"#   - {text}\n" in file.text


def test_megatron_flags_say_the_plan() -> None:
    _, text = _text("megatron")
    for flag in ("--micro-batch-size 1", "--expert-model-parallel-size 8", "--q-lora-rank 1536"):
        assert f"  {flag}\n" in text
