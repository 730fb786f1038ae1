"""What was exported comes back; what a job file says wrongly is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from flopwright.errors import InputError
from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.planner.export.deepspeed_json import deepspeed_json
from flopwright.planner.export.megatron import megatron_file
from flopwright.planner.export.torchtitan import torchtitan_file
from flopwright.planner.import_.deepspeed import import_deepspeed
from flopwright.planner.import_.megatron import import_megatron, parse_flags
from flopwright.planner.import_.torchtitan import import_torchtitan
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.load import load_cluster, load_model, make_plan_file
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import Workload

Make = Callable[..., PlanFile]


@pytest.fixture(scope="module")
def cluster() -> ClusterSpec:
    return load_cluster("2048_h800")


@pytest.fixture
def make(cluster: ClusterSpec) -> Make:
    def build(model: str, **axes: Any) -> PlanFile:
        scenario = Scenario(
            name="trial",
            model=load_model(model),
            cluster=cluster,
            workload=Workload.model_validate(
                {"seq_len": 4096, "global_batch_size": 256, "total_tokens": "10B"}
            ),
        )
        parallel = ParallelPlan.model_validate(axes)
        assert not plan_violations(parallel, scenario)
        return make_plan_file(scenario, parallel, "trial")

    return build


MEGATRON = (
    ("llama31_70b", {"tp": 4, "pp": 4, "dp_shard": 4, "zero_stage": 1, "micro_batch_size": 2}),
    ("llama31_70b", {"tp": 2, "pp": 4, "vpp": 5, "schedule": "interleaved_1f1b", "dp_shard": 2}),
    ("llama31_8b", {"cp": 4, "dp_shard": 2, "zero_stage": 3, "recompute": "full"}),
    ("llama31_8b", {"pp": 2, "layers_per_stage": [20, 12], "dp_shard": 2}),
    ("llama31_8b", {"tp": 2, "recompute": "selective", "recompute_tags": ["core_attn", "mlp"]}),
    ("llama31_8b", {"dp_shard": 8, "zero_stage": 1, "optimizer_offload": True}),
    ("deepseek_v3", {"tp": 2, "pp": 4, "ep": 8, "dp_shard": 8, "zero_stage": 1}),
    ("deepseek_v3", {"tp": 2, "etp": 2, "ep": 4, "dp_shard": 8, "zero_stage": 1}),
)


@pytest.mark.parametrize(("model", "axes"), MEGATRON)
def test_a_megatron_command_line_comes_back(
    make: Make, cluster: ClusterSpec, model: str, axes: dict[str, Any]
) -> None:
    plan = make(model, **axes)
    text = "torchrun --nproc-per-node 8 pretrain_gpt.py \\\n" + megatron_file(plan).text
    back = import_megatron(text, plan.scenario.model, cluster, gpus=plan.parallel.world_size)
    assert back.parallel == plan.parallel
    workload = plan.scenario.workload
    assert back.scenario.workload.precision == workload.precision
    assert back.scenario.workload.global_batch_size == workload.global_batch_size
    assert back.scenario.workload.num_steps == workload.num_steps


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        ("llama31_8b", {"dp_shard": 8, "zero_stage": 2, "micro_batch_size": 4}),
        ("llama31_8b", {"tp": 2, "dp_shard": 4, "zero_stage": 3, "optimizer_offload": True}),
        ("llama31_8b", {"tp": 2, "pp": 2, "dp_shard": 4, "zero_stage": 1, "recompute": "full"}),
        ("llama31_8b", {"cp": 2, "context_parallel": "ulysses", "dp_shard": 4}),
    ],
)
def test_a_deepspeed_json_comes_back(
    make: Make, cluster: ClusterSpec, model: str, axes: dict[str, Any]
) -> None:
    plan = make(model, **axes)
    back = import_deepspeed(
        deepspeed_json(plan),
        plan.scenario.model,
        cluster,
        gpus=plan.parallel.world_size,
        seq_len=4096,
        pp=plan.parallel.pp,
    )
    assert back.parallel == plan.parallel
    assert back.scenario.workload.global_batch_size == 256


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        ("llama31_70b", {"tp": 4, "dp_replicate": 2, "dp_shard": 8, "zero_stage": 3}),
        ("llama31_8b", {"dp_shard": 8, "zero_stage": 2, "recompute": "full"}),
        ("deepseek_v3", {"ep": 8, "dp_shard": 64, "zero_stage": 3, "recompute": "selective"}),
        ("llama31_8b", {"pp": 2, "dp_replicate": 4, "micro_batch_size": 2, "recompute": "none"}),
    ],
)
def test_a_torchtitan_file_comes_back(
    make: Make, cluster: ClusterSpec, model: str, axes: dict[str, Any]
) -> None:
    plan = make(model, data_parallel="fsdp2", **axes)
    back = import_torchtitan(
        torchtitan_file(plan).text,
        plan.scenario.model,
        cluster,
        gpus=plan.parallel.world_size,
    )
    assert back.parallel == plan.parallel
    assert back.scenario.workload.num_steps == plan.scenario.workload.num_steps


def test_a_command_line_is_read_in_every_form_people_write() -> None:
    flags = parse_flags("python x.py --a 1 \\\n  --b=2 --c\n# --d 3\nARGS=(\n --e_f 4 5\n)\n")
    assert flags == {"a": ("1",), "b": ("2",), "c": (), "e-f": ("4", "5")}


def test_megatrons_layout_with_repetitions(cluster: ClusterSpec) -> None:
    text = (
        "--num-layers 61 --seq-length 4096 --micro-batch-size 1 --global-batch-size 4096 --bf16 "
        "--pipeline-model-parallel-size 16 --expert-model-parallel-size 8 "
        "--pipeline-model-parallel-layout 'Et*3|(tt|)*29,m|L' --expert-tensor-parallel-size 1"
    )
    back = import_megatron(text, load_model("deepseek_v3"), cluster, gpus=2048)
    layers = back.parallel.layers_per_stage
    assert layers is not None
    assert (layers[0], layers[1], layers[-1], sum(layers)) == (3, 2, 0, 61)
    assert (back.parallel.vpp, back.parallel.schedule) == (2, "interleaved_1f1b")


def test_what_contradicts_the_model_or_cannot_be_read_is_named_at_once(
    cluster: ClusterSpec,
) -> None:
    text = (
        "--num-layers 33 --hidden-size big --micro-batch-size 1 --recompute-granularity selective"
    )
    text += " --recompute-modules core_attn everything"
    with pytest.raises(InputError) as error:
        import_megatron(text, load_model("llama31_8b"), cluster, gpus=8)
    fields = {v.field for v in error.value.violations}
    assert fields == {"--num-layers", "--hidden-size", "--recompute-modules", "--seq-length"}


def test_settings_without_a_counterpart_are_listed(cluster: ClusterSpec) -> None:
    text = "--seq-length 128 --bf16 --global-batch-size 8 --tp-comm-overlap --log-interval 10"
    back = import_megatron(text, load_model("llama31_8b"), cluster, gpus=8)
    assert back.not_read == ("--tp-comm-overlap", "--log-interval")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "train_batch_size"),
        ({"train_batch_size": "auto"}, "train_batch_size"),
        ({"tensor_parallel": {"autotp_size": 3}}, "gpus"),
    ],
)
def test_a_deepspeed_json_that_cannot_be(
    cluster: ClusterSpec, config: dict[str, Any], field: str
) -> None:
    with pytest.raises(InputError) as error:
        import_deepspeed(
            json.dumps(config), load_model("llama31_8b"), cluster, gpus=8, seq_len=128
        )
    assert error.value.violations[0].field == field


@pytest.mark.parametrize("text", ["", "[", "{}x", "[1]"])
def test_text_that_is_no_configuration(cluster: ClusterSpec, text: str) -> None:
    model = load_model("llama31_8b")
    with pytest.raises(InputError):
        import_deepspeed(text, model, cluster, gpus=8, seq_len=128)
    with pytest.raises(InputError):
        import_megatron(text, model, cluster, gpus=8)
