from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flopwright.errors import InputError
from flopwright.executor.launch.checks import LaunchOptions, check_request, entry_names
from flopwright.executor.launch.machine import Machine
from flopwright.executor.launch.request import RunRequest, read_request, write_json
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file
from flopwright.spec.scenario import Scenario

TWO_CORES = Machine(cores=2, gpus=0)


@pytest.fixture(scope="module")
def mini() -> Scenario:
    return load_scenario("kimi_k2_mini_2cpu_fp32")


def wide(scenario: Scenario, ranks: int) -> Scenario:
    node = scenario.cluster.node.model_copy(update={"gpus": ranks})
    return scenario.model_copy(
        update={"cluster": scenario.cluster.model_copy(update={"node": node})}
    )


def write(folder: Path, scenario: Scenario, name: str = "plan", **plan: Any) -> Path:
    path = folder / f"{name}.yaml"
    plan = {"micro_batch_size": 1, **plan}
    path.write_text(dump_yaml(make_plan_file(scenario, ParallelPlan(**plan), name)))
    return path


def refusal(
    plans: list[Path],
    out: Path | None = None,
    options: LaunchOptions | None = None,
    machine: Machine = TWO_CORES,
) -> str:
    with pytest.raises(InputError) as caught:
        check_request(plans, out, options or LaunchOptions(), machine)
    return str(caught.value)


def test_a_plan_that_fits_gives_a_request_that_reads_back(tmp_path: Path, mini: Scenario) -> None:
    plan = write(tmp_path, mini, dp_shard=2, zero_stage=1)
    request = check_request(
        [plan, plan], tmp_path / "out", LaunchOptions(steps=7, seed=5), TWO_CORES
    )
    assert [e.name for e in request.entries] == ["plan", "plan-2"]
    assert (request.steps, request.device, request.mismatch) == (7, "cpu", ())
    assert request.workload(request.entries[0]).seed == 5
    write_json(tmp_path / "request.json", request.to_data())
    assert read_request(tmp_path / "request.json") == request
    assert not (tmp_path / "out").exists()
    assert isinstance(request, RunRequest)


def test_steps_are_the_budgets_by_default(tmp_path: Path, mini: Scenario) -> None:
    request = check_request([write(tmp_path, mini, pp=2)], None, LaunchOptions(), TWO_CORES)
    assert request.steps == mini.workload.num_steps == 80


def test_too_many_ranks_are_refused_with_what_was_found(tmp_path: Path, mini: Scenario) -> None:
    plan = write(tmp_path, wide(mini, 16), dp_shard=16)
    message = refusal([plan])
    assert "16" in message
    assert "2 CPU cores" in message
    assert str(plan) in message
    shared = LaunchOptions(nproc=16)
    assert len(check_request([plan], None, shared, TWO_CORES).entries) == 1
    assert "--nproc asks for 2" in refusal([plan], options=LaunchOptions(nproc=2))
    # GPUs are not shared between ranks.
    assert "4 CUDA GPUs" in refusal([plan], options=shared, machine=Machine(cores=64, gpus=4))


@pytest.mark.parametrize(
    ("field", "ranks", "plan"),
    [
        ("parallel.tp", 5, {"tp": 5}),
        ("parallel.cp", 3, {"cp": 3}),
        ("parallel.zero_stage", 2, {"dp_shard": 2, "ep": 2, "zero_stage": 3}),
        ("parallel.data_parallel", 2, {"dp_shard": 2, "zero_stage": 1, "data_parallel": "none"}),
        ("parallel.dp_replicate", 2, {"dp_replicate": 2, "zero_stage": 1}),
    ],
)
def test_what_is_not_run_is_refused_by_name(
    tmp_path: Path, mini: Scenario, field: str, ranks: int, plan: dict[str, Any]
) -> None:
    message = refusal([write(tmp_path, mini, **plan)], machine=Machine(cores=ranks, gpus=0))
    assert field in message
    assert "this executor does not run it" in message


def test_every_plan_field_is_run_or_refused() -> None:
    """A new field of ParallelPlan has to be thought of here before it can be ignored."""
    whole = {"dp_shard", "pp", "vpp", "schedule", "ep", "etp", "micro_batch_size"}
    whole |= {"layers_per_stage", "context_parallel", "recompute_tags", "recompute_layers"}
    whole |= {"recompute", "fused_loss"}
    whole |= {"fp8_activations", "activation_offload", "optimizer_offload"}
    # Some values of these, or beside other fields, are refused.
    partly = {"tp", "cp", "sequence_parallel", "dp_replicate", "zero_stage", "data_parallel"}
    partly |= {"gradient_offload", "parameter_offload"}
    assert set(ParallelPlan.model_fields) == whole | partly


def test_other_formats_are_refused(tmp_path: Path, mini: Scenario) -> None:
    workload = mini.workload
    fp8 = workload.precision.model_copy(update={"compute": "fp8"})
    masters = workload.precision.model_copy(update={"master_weights": "fp32"})
    narrow = workload.precision.model_copy(update={"gradients": "bf16"})
    state = workload.precision.model_copy(update={"optimizer_state": "bf16"})
    for update, field in (
        ({"precision": fp8}, "workload.precision.weights"),
        ({"precision": masters}, "workload.precision.master_weights"),
        ({"precision": narrow}, "workload.precision.gradients"),
        ({"precision": state}, "workload.precision.optimizer_state"),
    ):
        scenario = mini.model_copy(update={"workload": workload.model_copy(update=update)})
        assert field in refusal([write(tmp_path, scenario, pp=2)])


def test_zero_in_fp64_is_refused(tmp_path: Path, mini: Scenario) -> None:
    precision = mini.workload.precision.model_copy(
        update=dict.fromkeys(("compute", "weights", "gradients", "optimizer_state"), "fp64")
    )
    workload = mini.workload.model_copy(update={"precision": precision})
    wide = mini.model_copy(update={"workload": workload})
    assert "in fp64" in refusal([write(tmp_path, wide, dp_shard=2, zero_stage=1)])
    assert check_request([write(tmp_path, wide, dp_shard=2)], None, LaunchOptions(), TWO_CORES)


def test_tied_embeddings_stay_on_one_stage(tmp_path: Path, mini: Scenario) -> None:
    tied = mini.model_copy(
        update={"model": mini.model.model_copy(update={"tied_embeddings": True})}
    )
    assert "tied embeddings" in refusal([write(tmp_path, tied, pp=2)])
    assert check_request(
        [write(tmp_path, tied, "dp", dp_shard=2)], None, LaunchOptions(), TWO_CORES
    )


def test_a_plan_for_another_device_needs_a_word(tmp_path: Path, mini: Scenario) -> None:
    gpu = mini.cluster.node.gpu.model_copy(update={"kind": "cuda"})
    node = mini.cluster.node.model_copy(update={"gpu": gpu})
    scenario = mini.model_copy(update={"cluster": mini.cluster.model_copy(update={"node": node})})
    plan = write(tmp_path, scenario, pp=2)
    assert "--allow-mismatch" in refusal([plan])
    allowed = check_request([plan], None, LaunchOptions(allow_mismatch=True), TWO_CORES)
    assert allowed.device == "cpu"
    assert "the plan is for cuda" in allowed.mismatch[0]
    on_gpus = check_request([plan], None, LaunchOptions(), Machine(cores=8, gpus=2))
    assert (on_gpus.device, on_gpus.mismatch) == ("cuda", ())


def test_a_cpu_plan_runs_on_the_cpu_of_a_gpu_machine(tmp_path: Path, mini: Scenario) -> None:
    plan = write(tmp_path, mini, pp=2)
    request = check_request([plan], None, LaunchOptions(), Machine(cores=8, gpus=2))
    assert request.device == "cpu"


def test_another_model_is_refused(tmp_path: Path, mini: Scenario) -> None:
    plan = write(tmp_path, mini, pp=2)
    same = LaunchOptions(model="kimi_k2_mini")
    assert len(check_request([plan], None, same, TWO_CORES).entries) == 1
    assert "model_hash" in refusal([plan], options=LaunchOptions(model="kimi_k2"))


def test_an_edited_plan_is_refused(tmp_path: Path, mini: Scenario) -> None:
    plan = write(tmp_path, mini, pp=2)
    plan.write_text(plan.read_text().replace("hidden_size: 192", "hidden_size: 256"))
    assert "does not match the contents" in refusal([plan])


def test_plans_of_one_launch_share_ranks_and_model(tmp_path: Path, mini: Scenario) -> None:
    one = write(tmp_path, mini, "one", dp_shard=2)
    two = write(tmp_path, mini, "two")
    assert "world_size" in refusal([one, two])
    deeper = mini.model_copy(update={"model": mini.model.model_copy(update={"num_layers": 5})})
    assert "model_hash" in refusal([one, write(tmp_path, deeper, "deeper", dp_shard=2)])


def test_a_folder_that_holds_something_is_refused(tmp_path: Path, mini: Scenario) -> None:
    plan = write(tmp_path, mini, pp=2)
    assert "--out" in refusal([plan], out=tmp_path)
    assert "--out" in refusal([plan], out=plan)
    (tmp_path / "empty").mkdir()
    assert check_request([plan], tmp_path / "empty", LaunchOptions(), TWO_CORES)


def test_everything_wrong_is_said_at_once(tmp_path: Path, mini: Scenario) -> None:
    plan = write(tmp_path, wide(mini, 40), dp_shard=8, tp=5)
    options = LaunchOptions(text=tmp_path / "nothing", names=("a", "b"))
    message = refusal([plan], out=tmp_path, options=options)
    for part in ("parallel.tp", "world_size", "--text", "--name", "--out"):
        assert part in message


def test_names_are_made_unique_and_safe(mini: Scenario) -> None:
    plans = [make_plan_file(mini, ParallelPlan(), name) for name in ("a b/c", "a b/c", "..", "ok")]
    assert entry_names(plans, ()) == ("a-b-c", "a-b-c-2", "plan", "ok")
    assert entry_names(plans[:2], ("x", "y")) == ("x", "y")


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, mini: Scenario, name: str) -> None:
    assert "--name" in refusal([write(tmp_path, mini, pp=2)], options=LaunchOptions(names=(name,)))
