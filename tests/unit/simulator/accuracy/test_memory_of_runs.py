"""Memory of published runs: what is learnt, what is left out of it, and what rows say."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.accuracy.memory import (
    EXACT,
    RESERVE,
    by_definition,
    fit_constants,
    memory_scores,
    predicted_memory,
    run_bytes,
    run_bytes_of,
)
from flopwright.simulator.accuracy.memory_constants import (
    CONSTANTS,
    shipped_constants,
    write_constants,
)
from flopwright.simulator.accuracy.memory_habits import profile_of_run
from flopwright.simulator.accuracy.run_of_row import PublishedRun, published_runs
from flopwright.simulator.accuracy.stack_of_row import StackKey
from flopwright.simulator.memory.profile import MemoryProfile
from flopwright.spec.load import load_model, load_scenario

BASE = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
PLAN = ParallelPlan(tp=8, dp_shard=8, zero_stage=1)


def _run(
    name: str = "a",
    model: str = "llama31_8b",
    memory: Mapping[str, float] | None = None,
    framework: str = "Megatron-LM",
    era: str = "fused",
    **more: object,
) -> PublishedRun:
    workload = BASE.workload.model_copy(update={"seq_len": 4096, "global_batch_size": 64})
    scenario = BASE.model_copy(update={"model": load_model(model), "workload": workload})
    run = PublishedRun(
        id=name,
        row_ids=(name,),
        source="someone",
        model_name=model,
        gpu="h800_sxm",
        stack=StackKey(framework.split("-")[0].lower(), era, "dense"),
        cell=f"someone | {model} | h800_sxm",
        scenario=scenario,
        plan=PLAN,
        num_gpus=8,
        memory=memory or {},
        framework=framework,
    )
    return replace(run, **more)  # type: ignore[arg-type]


def _reading(
    run: PublishedRun, definition: str, factor: float, extra: float = 0.0
) -> PublishedRun:
    return replace(run, memory={definition: run_bytes(run).held * factor + extra})


def test_constants_are_those_that_the_readings_were_made_with() -> None:
    runs = [
        _reading(_run("a"), "reserved", 1.07),
        _reading(_run("b", "llama2_7b"), "smi", 1.07, 3e9),
    ]
    constants = fit_constants(runs, run_bytes_of(runs)[0])
    assert constants.factors == {"reserved": pytest.approx(1.07)}
    assert constants.group_bytes == pytest.approx(3e9 / 4)  # context, all ranks, dp, tp
    assert constants.free_parameters == 2
    for run in runs:
        definition, measured = next(iter(run.memory.items()))
        assert by_definition(run_bytes(run), constants)[definition] == pytest.approx(measured)


def test_a_model_is_predicted_by_what_other_models_taught() -> None:
    odd = _reading(_run("odd", "llama2_7b"), "reserved", 2.0)
    runs = [odd, *(_reading(_run(f"r{i}"), "reserved", 1.05) for i in range(3))]
    by_id = {r.id: r for r in memory_scores(runs).runs}
    assert by_id["odd"].error == pytest.approx(1.05 / 2 - 1)
    assert by_id["r0"].error == pytest.approx(2 / 1.05 - 1)


def test_allocated_and_resident_are_never_fitted() -> None:
    wrong = _reading(_run(), "allocated", 3.0)
    constants = fit_constants([wrong], run_bytes_of([wrong])[0])
    predicted = by_definition(run_bytes(wrong), constants)
    assert constants.free_parameters == 0
    assert predicted["allocated"] == run_bytes(wrong).allocated
    assert set(EXACT) <= set(predicted)


def test_without_a_teacher_the_catalog_says_what_a_card_keeps() -> None:
    run = _reading(_run(), "smi", 1.2)
    found = memory_scores([run]).runs[0]
    gpu = run.scenario.cluster.node.gpu
    wanted = run_bytes(run).held * RESERVE + gpu.reserved_bytes
    assert found.predicted == pytest.approx(wanted)


def test_a_run_that_was_measured_fitted_its_card() -> None:
    run = _run(plan=ParallelPlan(micro_batch_size=16))
    predicted = predicted_memory(run)
    card = run.scenario.cluster.node.gpu.hbm_bytes
    assert run_bytes(run).allocated > card
    assert predicted["allocated"] == predicted["smi"] == card


def test_runs_whose_plan_is_a_guess_stand_apart_and_teach_nothing() -> None:
    guess = _reading(_run("guess", flags=frozenset({"own-plan"})), "reserved", 9.0)
    sound = [_reading(_run("a", "llama2_7b"), "reserved", 1.1)]
    scores = memory_scores([guess, *sound])
    assert [r.id for r in scores.apart] == ["guess"]
    assert [r.id for r in scores.runs] == ["a"]
    whole = fit_constants([guess, *sound], run_bytes_of([guess, *sound])[0])
    assert whole.factors["reserved"] == pytest.approx(1.1)


def test_a_reading_inside_the_spread_is_inside_the_interval() -> None:
    runs = [_reading(_run(f"m{i}", m), "reserved", f) for i, (m, f) in enumerate(
        [("llama31_8b", 1.0), ("llama2_7b", 1.05), ("qwen3_8b", 1.1)]
    )]  # fmt: skip
    scored = {r.id: r for r in memory_scores(runs).runs}
    assert scored["m1"].low < scored["m1"].measured < scored["m1"].high
    assert all(r.low < r.predicted < r.high for r in scored.values())


def test_the_rank_that_was_read_is_the_rank_that_is_predicted() -> None:
    plan = ParallelPlan(pp=4)
    whole, last, first = (
        run_bytes(replace(_run(), plan=plan, notes=notes)).allocated
        for notes in ("", "torch allocator bytes on the LAST rank", "memory is rank-0 peak")
    )
    assert whole == max(whole, first, last)
    assert first != last


def test_rows_say_what_their_runs_do_otherwise() -> None:
    plain = profile_of_run(_run())
    assert plain.weight_gradients == "dummy"
    notes = "flags: no-gradient-accumulation-fusion, attention-backend=unfused"
    said = profile_of_run(_run(notes=notes))
    assert (said.weight_gradients, said.attention) == ("separate", "unfused")
    assert profile_of_run(_run(era="unfused")).attention == "unfused"
    titan = _run(framework="torchtitan", notes="torch.compile", era="compiled")
    old, new = (profile_of_run(replace(titan, year=y)) for y in (2024, 2025))
    assert new.logit_bytes < old.logit_bytes
    eager = _run(framework="torchtitan", era="eager")
    assert profile_of_run(eager).eager


def test_a_cumulative_ladder_keeps_its_earlier_steps() -> None:
    def step(name: str) -> MemoryProfile:
        notes = f"cumulative optimisation ladder, step: {name}"
        return profile_of_run(_run(framework="torchtune", notes=notes))

    assert step("+packed").loss_chunks == 1
    late = step("+8-bit AdamW")
    assert (late.loss_chunks, late.moment_bytes, late.gradient_bytes) == (8, 1, 0)


def test_committed_constants_are_sane_and_written_back_the_same(tmp_path: Path) -> None:
    shipped = shipped_constants()
    assert 1 <= shipped.factors["reserved"] < 1.2
    assert 0 < (shipped.group_bytes or 0) < 3e9
    write_constants(shipped, tmp_path / "constants.yaml")
    assert (tmp_path / "constants.yaml").read_text() == CONSTANTS.read_text()
    assert set(predicted_memory(_run())) >= {"allocated", "resident", "reserved", "smi"}


def test_the_measured_table_is_predicted_without_a_failure(
    measured_data: Path, tmp_path: Path
) -> None:
    """Golden runs of one publisher: their file is large, so only its own rows are read."""
    table = (measured_data / "validation" / "training_runs.csv").read_text().splitlines()
    mine = [table[0], *(row for row in table if row.startswith(("mlmgold-", "simumax-")))]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(mine) + "\n")
    scores = memory_scores(published_runs(path).runs)
    assert not scores.failed
    assert len(scores.runs) > 80
    assert all(0.2 < r.predicted / r.measured < 5 for r in scores.runs)
