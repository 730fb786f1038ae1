"""docs/executor.md says what is run and refused: its tables against the rules, value by value."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from flopwright.executor.launch.supported import refused_fields, unsupported
from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.cluster import Dtype
from flopwright.spec.load import load_scenario, make_plan_file
from flopwright.spec.model import GqaAttention
from flopwright.spec.workload import ExpertLoad, Optimizer, Precision

DOC = Path(__file__).parents[4] / "docs" / "executor.md"
Cell = tuple[str, ...]
# Records whose named values the table has to list in full.
OWNERS = {
    "workload.optimizer": Optimizer,
    "workload.expert_load": ExpertLoad,
    "workload.precision": Precision,
}


def rows(first_header: str) -> tuple[list[str], list[list[Cell]]]:
    """Returns a table's header and, for each cell of its rows, the words in backticks."""
    lines = DOC.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_header} |"))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = line.strip("|").split("|")
        table.append([tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells])
    return [h.strip() for h in lines[start].strip("|").split("|")], table


@pytest.fixture(scope="module")
def plan() -> PlanFile:
    return make_plan_file(load_scenario("kimi_k2_mini_2cpu_fp32"), ParallelPlan(), "p")


def with_value(plan: PlanFile, field: str, value: str) -> PlanFile:
    room, _, name = field.partition(".")
    if room == "parallel":
        typed: Any = int(value) if value.isdecimal() else value
        typed = {"true": True, "false": False}.get(value, typed)
        parallel = plan.parallel.model_copy(update={name: typed})
        return plan.model_copy(update={"parallel": parallel})
    number: Any = int(value) if value.isdecimal() else value
    scenario = _with(plan.scenario, field.split("."), number)
    return plan.model_copy(update={"scenario": scenario})


def _with(record: Any, path: list[str], value: Any) -> Any:
    """Returns the record with the field at `path` replaced."""
    inner = _with(getattr(record, path[0]), path[1:], value) if path[1:] else value
    return record.model_copy(update={path[0]: inner})


def with_workload(plan: PlanFile, **update: Any) -> PlanFile:
    workload = plan.scenario.workload.model_copy(update=update)
    scenario = plan.scenario.model_copy(update={"workload": workload})
    return plan.model_copy(update={"scenario": scenario})


def test_every_value_in_the_table_is_run_or_refused_as_it_says(plan: PlanFile) -> None:
    _, table = rows("field")
    assert not unsupported(plan)
    for (field,), runs, refuses, _ in table:
        for value in runs:
            assert not unsupported(with_value(plan, field, value)), (field, value)
        for value in refuses:
            found = unsupported(with_value(plan, field, value))
            assert field in {v.field for v in found}, (field, value)


def test_the_table_names_every_value_that_there_is() -> None:
    _, table = rows("field")
    for (field,), runs, refuses, _ in table:
        room, _, name = field.rpartition(".")
        owner: Any = ParallelPlan if room == "parallel" else OWNERS.get(room)
        if owner is None:
            continue
        known = get_args(owner.model_fields[name].annotation)
        if known and isinstance(known[0], str):
            assert {*runs, *refuses} == set(known), field
        elif known and name == "zero_stage":
            assert {*map(int, (*runs, *refuses))} == set(known), field


def test_no_field_with_a_rule_is_left_out(plan: PlanFile) -> None:
    header, _ = rows("weights")
    precision = {f"workload.precision.{name}" for name in header}
    assert "workload.precision.gemm" not in precision
    fields = {field for (field,), *_ in rows("field")[1]}
    assert fields | precision == refused_fields(plan) | {"workload.precision.compute"}


def test_exactly_the_listed_formats_run(plan: PlanFile) -> None:
    header, table = rows("weights")
    listed = {tuple(value for (value,) in row) for row in table}
    dtypes = get_args(Dtype)
    # gemm stands in the other table, frozen_weights beside adapters, which are refused.
    assert {*header, "gemm", "frozen_weights"} == set(Precision.model_fields)
    runs = set()
    for values in product(
        *[(*dtypes, "none") if h == "master_weights" else dtypes for h in header]
    ):
        precision = Precision(**dict(zip(header, values, strict=True)))
        if not unsupported(with_workload(plan, precision=precision)):
            runs.add(values)
    assert runs == listed


def test_the_exceptions_in_words_hold(plan: PlanFile) -> None:
    fp64 = Precision(
        **dict.fromkeys(("weights", "compute", "gradients", "optimizer_state"), "fp64"),
        master_weights="none",
    )
    zero = with_value(plan, "parallel.zero_stage", "1")
    assert [v.field for v in unsupported(with_workload(zero, precision=fp64))] == [
        "parallel.zero_stage"
    ]
    sharded = with_value(zero, "parallel.data_parallel", "fsdp2")
    assert not unsupported(with_workload(sharded, precision=fp64))
    none = with_value(zero, "parallel.data_parallel", "none")
    assert [v.field for v in unsupported(none)] == ["parallel.data_parallel"]
    tied = plan.scenario.model.model_copy(update={"tied_embeddings": True})
    scenario = plan.scenario.model_copy(update={"model": tied})
    stages = with_value(plan.model_copy(update={"scenario": scenario}), "parallel.pp", "2")
    assert [v.field for v in unsupported(stages)] == ["parallel.pp"]


def _refused(plan: PlanFile, bf16: bool = False, **parallel: Any) -> list[str | None]:
    """Returns the fields refused of a plan for two shards with `parallel` on top."""
    wanted = plan.parallel.model_copy(update={"dp_shard": 2, **parallel})
    plan = plan.model_copy(update={"parallel": wanted})
    if bf16:
        plan = with_workload(plan, precision=Precision())
    return [v.field for v in unsupported(plan)]


def test_what_a_data_parallel_library_cannot_do_is_refused_by_name(plan: PlanFile) -> None:
    fsdp2 = {"data_parallel": "fsdp2"}
    for zero in (1, 2, 3):
        assert not _refused(plan, zero_stage=zero)
        assert not _refused(plan, zero_stage=zero, dp_replicate=2, ep=2, **fsdp2)
        replicated = _refused(plan, zero_stage=zero, dp_replicate=2)
        assert replicated == ["parallel.dp_replicate"]
    assert _refused(plan, zero_stage=3, ep=2) == ["parallel.zero_stage"]
    assert not _refused(plan, zero_stage=2, ep=2)
    assert not _refused(plan, zero_stage=3, recompute="full")


def test_parts_stand_on_the_host_together(plan: PlanFile) -> None:
    optimizer: dict[str, Any] = {"optimizer_offload": True}
    gradient: dict[str, Any] = {**optimizer, "gradient_offload": True}
    everything: dict[str, Any] = {**gradient, "parameter_offload": True}
    fsdp2 = {"data_parallel": "fsdp2"}
    assert not _refused(plan, zero_stage=1, **optimizer)
    assert _refused(plan, zero_stage=2, **optimizer) == ["parallel.gradient_offload"]
    assert not _refused(plan, zero_stage=2, **gradient)
    assert not _refused(plan, bf16=True, zero_stage=2, **optimizer)
    assert _refused(plan, bf16=True, zero_stage=2, **gradient) == ["parallel.gradient_offload"]
    assert not _refused(plan, zero_stage=3, **gradient)
    assert not _refused(plan, zero_stage=3, **everything)
    away = _refused(plan, zero_stage=3, parameter_offload=True)
    assert away == ["parallel.parameter_offload"]
    assert not _refused(plan, zero_stage=3, **everything, **fsdp2)
    apart = _refused(plan, zero_stage=3, **gradient, **fsdp2)
    assert apart == ["parallel.parameter_offload"]


def _shared(plan: PlanFile, attention: dict[str, Any] | None = None, **parallel: Any) -> list[str]:
    """Returns the fields refused of a plan, the model's heads being those of `attention`."""
    spec = plan.scenario.model
    if attention is not None:
        heads = GqaAttention(**{"num_heads": 8, "num_kv_heads": 4, "head_dim": 8, **attention})
        spec = spec.model_copy(update={"attention": heads})
    scenario = plan.scenario.model_copy(update={"model": spec})
    wanted = plan.parallel.model_copy(update=parallel)
    found = unsupported(plan.model_copy(update={"scenario": scenario, "parallel": wanted}))
    return sorted({str(v.field) for v in found})


def test_uneven_cuts_of_matrices_and_sequences_are_refused_by_name(plan: PlanFile) -> None:
    seq_len, vocab = plan.scenario.workload.seq_len, plan.scenario.model.vocab_size
    for kind in ("ring", "all_gather", "ulysses"):
        for attention in (None, {}):
            assert not _shared(plan, attention, tp=2, cp=2, context_parallel=kind)
    assert _shared(plan, {}, tp=8) == ["parallel.tp"]  # four key heads
    assert _shared(plan, tp=5) == ["parallel.tp"]
    assert _shared(plan, tp=vocab) == ["parallel.tp"]
    assert _shared(plan, cp=seq_len) == ["parallel.cp"]  # two runs a rank
    assert not _shared(plan, cp=seq_len, context_parallel="ulysses")
    assert _shared(plan, {}, tp=2, cp=4, context_parallel="ulysses") == ["parallel.cp"]
    assert _shared(plan, {"sliding_window": 8}, cp=2) == ["parallel.cp"]
    assert not _shared(plan, {"sliding_window": 8}, cp=2, context_parallel="ulysses")
    normed = _shared(plan, {"qk_norm": True}, tp=2, sequence_parallel=False)
    assert normed == ["parallel.sequence_parallel"]
    assert not _shared(plan, {"qk_norm": True}, tp=2)
