"""Every question's answer is what planning again by hand gives."""

from collections.abc import Sequence
from typing import Any

import pytest

from flopwright.errors import InputError
from flopwright.plan.parallel import RECOMPUTE_TAGS, ParallelPlan
from flopwright.planner.questions.answer import Answer
from flopwright.planner.questions.precision import RECIPES
from flopwright.planner.questions.registry import QUESTIONS, question
from flopwright.report.metrics import StepMetrics
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import load_cluster, load_model, load_scenario
from flopwright.spec.parameters import layer_parameters
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import Precision

MODEL = load_model("llama31_8b").model_copy(update={"num_layers": 8, "max_seq_len": 16_384})
WORKLOAD = load_scenario("kimi_k2_mini_2cpu_fp32").workload.model_copy(
    update={
        "seq_len": 4096,
        "global_batch_size": 32,
        "total_tokens": 10**10,
        "precision": Precision(),
    }
)
BIG = Scenario(name="b", model=MODEL, cluster=load_cluster("8_h100"), workload=WORKLOAD)
CALIBRATION = default_calibration(BIG.cluster.node.gpu)
PLAN = ParallelPlan(dp_shard=8, zero_stage=2, recompute="selective", micro_batch_size=2)


def _on(scenario: Scenario, nodes: int = 1, gib: float | None = None) -> Scenario:
    """The scenario on other hardware, built apart from what is tested."""
    cluster = scenario.cluster.to_data()
    cluster["num_nodes"] = nodes
    if gib is not None:
        cluster["node"]["gpu"]["hbm"] = f"{gib} GiB"
    return Scenario.model_validate(scenario.to_data() | {"cluster": cluster})


TIGHT = _on(BIG, gib=30)


def _metrics(scenario: Scenario, plan: ParallelPlan, **changes: Any) -> StepMetrics:
    changed = plan.model_copy(update=changes)
    prediction, _ = predict(scenario, changed, CALIBRATION, whole_trace=False)
    return prediction.metrics


def _fits(scenario: Scenario, metrics: StepMetrics) -> bool:
    return metrics.peak_memory_bytes <= scenario.cluster.node.gpu.hbm_bytes


def _fastest(scenario: Scenario, plan: ParallelPlan, every: Sequence[dict[str, Any]]) -> Any:
    """The change with the shortest step among those that fit, by hand."""
    found = [(_metrics(scenario, plan, **c), i) for i, c in enumerate(every)]
    fitting = [(m.step_time_s, i) for m, i in found if _fits(scenario, m)]
    return every[min(fitting)[1]]


def _ask(name: str, scenario: Scenario = BIG, plan: ParallelPlan = PLAN) -> Answer:
    answer = question(name).answer(scenario, plan, CALIBRATION)
    assert answer.question == name
    assert answer.text.endswith(".")
    assert answer.replans
    return answer


def test_all_seventeen_can_be_asked() -> None:
    assert len(QUESTIONS) == 17
    with pytest.raises(InputError, match="did you mean 'best_batch'"):
        question("best_bach")


def test_expected_peak() -> None:
    data, own = _ask("expected_peak").data, _metrics(BIG, PLAN)
    assert data["peak_bytes"] == own.peak_memory_bytes
    assert data["memory_bytes"] == own.memory_bytes[0]
    assert data["free_bytes"] == 80 * 2**30 - own.peak_memory_bytes


def test_sharding_stage() -> None:
    data = _ask("sharding_stage", TIGHT).data
    for zero in range(4):
        own = _metrics(TIGHT, PLAN, zero_stage=zero)
        assert data["by_stage"][str(zero)]["peak_bytes"] == own.peak_memory_bytes
        assert data["by_stage"][str(zero)]["step_time_s"] == pytest.approx(own.step_time_s)
    stages = [{"zero_stage": z} for z in range(4)]
    assert data["zero_stage"] == _fastest(TIGHT, PLAN, stages)["zero_stage"]
    assert data["zero_stage"] > 1  # memory rules out the others


def test_sharding_stage_of_a_pipeline_says_what_is_refused() -> None:
    plan = ParallelPlan(pp=2, dp_shard=4, zero_stage=1)
    data = _ask("sharding_stage", BIG, plan).data
    assert list(data["by_stage"]) == ["0", "1"]
    assert "pipeline" in data["refused"]["2"]


def test_best_batch() -> None:
    data = _ask("best_batch", TIGHT).data
    every = [
        {"micro_batch_size": b, "recompute": r}
        for r in ("none", "selective", "full")
        for b in (1, 2, 4)
    ]
    best = _fastest(TIGHT, PLAN, every)
    assert {k: data[k] for k in best} == best
    own = _fastest(TIGHT, PLAN, [{"micro_batch_size": b} for b in (1, 2, 4)])
    assert data["micro_batch_size_as_planned"] == own["micro_batch_size"]
    sizes = [b for b in (1, 2, 4) if _fits(TIGHT, _metrics(TIGHT, PLAN, micro_batch_size=b))]
    assert data["largest_as_planned"] == max(sizes)


def test_longest_sequence() -> None:
    data = _ask("longest_sequence", TIGHT).data
    longest, unit = data["seq_len_as_planned"], data["unit_tokens"]
    assert data["limit"] == "memory"

    def holds(seq_len: int, **changes: Any) -> bool:
        workload = TIGHT.workload.model_copy(update={"seq_len": seq_len})
        setting = TIGHT.model_copy(update={"workload": workload})
        return _fits(setting, _metrics(setting, PLAN, **changes))

    assert holds(longest)
    assert not holds(longest + unit)
    assert data["seq_len_with_memory_switches"] > longest
    assert holds(data["seq_len_with_memory_switches"], recompute="full", activation_offload=True)


def test_longest_sequence_of_a_roomy_plan_is_the_models_own() -> None:
    small = {"recompute": "full", "micro_batch_size": 1}
    data = _ask("longest_sequence", BIG, PLAN.model_copy(update=small)).data
    assert data["limit"] == "the model's max_seq_len"
    assert data["seq_len_as_planned"] == MODEL.max_seq_len


def test_data_parallel_size() -> None:
    data = _ask("data_parallel_size").data
    for dp, setting in ((4, BIG), (8, BIG), (16, _on(BIG, nodes=2))):
        own = _metrics(setting, PLAN, dp_shard=dp)
        assert data["by_dp"][str(dp)]["step_time_s"] == pytest.approx(own.step_time_s)
        assert data["by_dp"][str(dp)]["peak_bytes"] == own.peak_memory_bytes
    assert set(data["not_sharded_bytes"]) == {"weights", "activations", "temporaries", "reserved"}


def test_optimizer_on_cpu() -> None:
    data = _ask("optimizer_on_cpu").data
    here, away = _metrics(BIG, PLAN), _metrics(BIG, PLAN, optimizer_offload=True)
    assert data["saved_bytes"] == here.peak_memory_bytes - away.peak_memory_bytes > 0
    assert data["added_s"] == pytest.approx(away.step_time_s - here.step_time_s, rel=0.02)


def test_optimizer_on_cpu_without_a_host_link_says_so() -> None:
    mini = load_scenario("kimi_k2_mini_2cpu_fp32")
    plan = ParallelPlan(dp_shard=2, zero_stage=1, micro_batch_size=4)
    answer = _ask("optimizer_on_cpu", mini, plan)
    assert answer.data["saved_bytes"] is None
    assert "host_link" in answer.text


def test_recompute_policy() -> None:
    data = _ask("recompute_policy", TIGHT).data
    policies = [{"recompute": r} for r in ("none", "selective", "full")]
    assert data["policy"] == _fastest(TIGHT, PLAN, policies)["recompute"] != "none"
    own = _metrics(TIGHT, PLAN, recompute="none")
    assert data["by_policy"]["none"]["peak_bytes"] == own.peak_memory_bytes
    assert data["by_policy"]["none"]["fits"] is False


def test_recompute_groups() -> None:
    data = _ask("recompute_groups").data
    none = _metrics(BIG, PLAN, recompute="none")
    rates = {}
    for tag in RECOMPUTE_TAGS:
        own = _metrics(BIG, PLAN, recompute_tags=(tag,))
        saved = none.peak_memory_bytes - own.peak_memory_bytes
        if saved <= 0:
            assert tag not in data["by_group"]
            continue
        row = data["by_group"][tag]
        assert row["saved_bytes"] == saved
        assert row["added_s"] == pytest.approx(own.step_time_s - none.step_time_s, rel=0.02)
        rates[tag] = saved / (own.step_time_s - none.step_time_s)
    assert len(rates) >= 4
    told = [g for g in data["best_by_bytes_per_s"] if g in rates]
    assert rates[told[0]] == pytest.approx(max(rates.values()))


def test_recompute_depth() -> None:
    plan, setting = PLAN.model_copy(update={"micro_batch_size": 4}), _on(BIG, gib=40)
    data = _ask("recompute_depth", setting, plan).data

    def holds(layers: int) -> bool:
        changes = {"recompute": "full", "recompute_layers": layers}
        return _fits(setting, _metrics(setting, plan, **changes))

    fewest = next(n for n in range(9) if holds(n))
    assert data["layers"] == fewest
    assert 0 < fewest < data["of_layers"] == 8


def _in(precision: Precision) -> Scenario:
    return BIG.model_copy(
        update={"workload": WORKLOAD.model_copy(update={"precision": precision})}
    )


def test_fp32_gradients() -> None:
    data = _ask("fp32_gradients").data
    wide, narrow = _metrics(BIG, PLAN), _metrics(_in(Precision(gradients="bf16")), PLAN)
    assert data["added_bytes"] == wide.peak_memory_bytes - narrow.peak_memory_bytes > 0
    assert data["added_s"] == pytest.approx(wide.step_time_s - narrow.step_time_s, rel=0.02)


def test_precision_recipe() -> None:
    data = _ask("precision_recipe").data
    steps = {}
    for name, precision in RECIPES.items():
        own = _metrics(_in(precision), PLAN)
        row = data["by_recipe"]["as planned" if precision == Precision() else name]
        assert row["peak_bytes"] == own.peak_memory_bytes
        assert row["step_time_s"] == pytest.approx(own.step_time_s)
        steps[name] = own.step_time_s
    assert steps[data["recipe"]] == min(steps.values())


def test_when_hybrid() -> None:
    data = _ask("when_hybrid").data
    start = None
    for row, factor in zip(data["by_gpus"], (1, 2, 4, 8), strict=True):
        workload = WORKLOAD.model_copy(update={"global_batch_size": 32 * factor})
        setting = _on(BIG, nodes=factor).model_copy(update={"workload": workload})
        gpus = 8 * factor
        splits = [
            {"dp_replicate": r, "dp_shard": gpus // r, "zero_stage": 3}
            for r in (1, 2, 4, 8, 16, 32, 64)
            if r < gpus
        ]
        best = _fastest(setting, PLAN, splits)
        assert row["gpus"] == gpus
        assert row["best_replicas"] == best["dp_replicate"]
        full = _metrics(setting, PLAN, **splits[0])
        assert row["full_shard_s"] == pytest.approx(full.step_time_s)
        start = start or (gpus if best["dp_replicate"] > 1 else None)
    assert data["from_gpus"] == start


def test_smaller_mesh() -> None:
    data = _ask("smaller_mesh").data
    full = _metrics(BIG, PLAN)
    splits = [{"dp_replicate": r, "dp_shard": 8 // r} for r in (1, 2, 4)]
    assert data["dp_shard"] == _fastest(BIG, PLAN, splits)["dp_shard"]
    for row, split in zip(data["by_dp_shard"], splits, strict=True):
        own = _metrics(BIG, PLAN, **split)
        assert row["dp_shard"] == split["dp_shard"]
        assert row["added_bytes"] == own.peak_memory_bytes - full.peak_memory_bytes
        saved = full.step_time_s - own.step_time_s
        assert row["saved_s"] == pytest.approx(saved, rel=0.02, abs=1e-9)


def test_keep_unsharded() -> None:
    data = _ask("keep_unsharded").data
    stays, again = _metrics(BIG, PLAN), _metrics(BIG, PLAN, zero_stage=3)
    assert data["possible"] is True
    assert data["added_bytes"] == stays.peak_memory_bytes - again.peak_memory_bytes > 0
    assert data["saved_s"] == pytest.approx(again.step_time_s - stays.step_time_s, rel=0.02)
    low = _on(BIG, gib=stays.peak_memory_bytes // 2**30)
    assert _ask("keep_unsharded", low).data["possible"] is False


def test_largest_activations() -> None:
    """What a module keeps is what a plan that recomputes the module no longer holds."""
    plan = PLAN.model_copy(update={"recompute": "none"})
    data = _ask("largest_activations", BIG, plan).data
    parts = data["by_module_bytes"]
    held = _metrics(BIG, plan).memory_bytes[0]["activations"]
    assert sum(parts.values()) == pytest.approx(held, rel=1e-6)
    changes = {"recompute": "selective", "recompute_tags": ("mlp",)}
    without = _metrics(BIG, plan, **changes).memory_bytes[0]["activations"]
    assert parts["feed-forward"] == pytest.approx(held - without, rel=1e-6)
    assert data["module"] == "feed-forward" == max(parts, key=lambda m: parts[m])


def test_largest_unit() -> None:
    plan = ParallelPlan(tp=2, dp_shard=4, zero_stage=3)
    data = _ask("largest_unit", BIG, plan).data
    by_hand = {
        "embedding": 128_256 * 4096 // 2 * 2,
        "dense": sum(p.numel // (2 if p.is_matrix else 1) * 2 for p in layer_parameters(MODEL, 3)),
        "head": (128_256 * 4096 // 2 + 4096) * 2,
    }
    assert data["by_unit_bytes"] == by_hand
    assert data["unit"] == "head"
    assert data["largest_layer_bytes"] == by_hand["dense"]


def test_what_recompute_keeps() -> None:
    data = _ask("what_recompute_keeps").data
    none, full = (_metrics(BIG, PLAN, recompute=r) for r in ("none", "full"))
    assert data["saved_bytes"] == none.peak_memory_bytes - full.peak_memory_bytes
    assert data["activations_full_bytes"] == full.memory_bytes[0]["activations"]
    # bf16 [2 sequences, 4096 tokens, 4096] for each of 8 layers, one micro-batch in flight.
    inputs = 8 * 2 * 4096 * 4096 * 2
    assert data["kept_by_module_bytes"]["layer inputs"] == pytest.approx(inputs, rel=1e-6)
    states = ("weights", "gradients", "optimizer_state", "reserved")
    assert data["untouched_bytes"] == {k: full.memory_bytes[0][k] for k in states}
