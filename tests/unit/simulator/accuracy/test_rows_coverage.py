"""The measured public rows themselves: nearly all of them become runs, each of a sound shape."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from flopwright.plan.parallel import plan_violations
from flopwright.simulator.accuracy.run_of_row import PublishedRuns, published_runs
from flopwright.spec.parameters import num_params


@pytest.fixture(scope="module")
def found(measured_data: Path) -> PublishedRuns:
    return published_runs(measured_data / "validation" / "training_runs.csv")


@pytest.mark.slow
def test_at_least_nine_in_ten_rows_in_scope_become_runs(found: PublishedRuns) -> None:
    used = Counter(r.source for r in found.runs if "vtrain-single" not in r.flags)
    lost = [reason for _, reason in found.skipped if not reason.startswith("out of scope")]
    rows = sum(len(r.row_ids) for r in found.runs if "vtrain-single" not in r.flags)
    assert len(used) >= 18
    assert rows / (rows + len(lost)) >= 0.9


@pytest.mark.slow
def test_every_run_is_of_a_sound_shape(found: PublishedRuns) -> None:
    for run in found.runs:
        assert not plan_violations(run.plan, run.scenario), run.id
        assert run.plan.world_size == run.num_gpus, run.id
        assert run.assumed, run.id
        assert run.measured_step_s is not None or run.memory, run.id
        assert 0 < (run.measured_step_s or 1) < 1e4, run.id


@pytest.mark.slow
def test_no_row_is_in_two_runs_and_repeats_are_merged(found: PublishedRuns) -> None:
    ids = [i for run in found.runs for i in run.row_ids]
    assert len(ids) == len(set(ids))
    by_id = {i: run.id for run in found.runs for i in run.row_ids}
    for a, b in (
        ("bloom-a100-0484-step_time", "bloom-a100-0535-step_time"),
        ("bloom-a100-0482-step_time", "bloom-a100-0582-step_time"),
        ("bloom-a100-0483-step_time", "bloom-a100-0526-step_time"),
    ):
        assert by_id[a] == by_id[b]
    assert (
        by_id["titan-8b-8-eager-tokens_per_s_per_gpu"]
        != (by_id["titan-8b-8-compile-tokens_per_s_per_gpu"])
    )


@pytest.mark.slow
def test_models_have_the_size_that_their_rows_state(found: PublishedRuns) -> None:
    off = []
    for run in found.runs:
        whole = run.scenario.model
        name = run.model_name.split("+")[0]
        if "reduced-layers" in run.flags or name in {"llamastyle7b"}:
            continue
        size = next((s for k, s in SIZES.items() if name == k), None)
        if size is not None and abs(num_params(whole) / 1e9 / size - 1) > 0.02:
            off.append(run.id)
    assert off == []


SIZES = {"llama38b": 8.03, "llama370b": 70.6, "llama3405b": 405.9, "llama27b": 6.74,
         "llama270b": 69.0, "qwen330ba3b": 30.5, "qwen3235ba22b": 235.0, "gptoss120b": 116.8,
         "mixtral8x7b": 46.7}  # fmt: skip


@pytest.mark.slow
def test_headline_leaves_out_what_is_set_apart(found: PublishedRuns) -> None:
    by_flag = Counter(f for r in found.runs for f in r.flags)
    assert by_flag["vtrain-single"] == 720
    assert by_flag["tp-across-nodes"] >= 6
    head = [r for r in found.runs if r.in_overall]
    assert len(head) > 400
    assert {r.gpu for r in head} >= {"h100_sxm", "a100_sxm_80gb", "b200", "gb200", "mi300x"}
    assert {r.stack.family for r in head} == {"dense", "moe"}
