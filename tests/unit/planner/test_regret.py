"""Hand-tuned configurations among all plans of their scenario."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from flopwright.cli import app
from flopwright.errors import InputError
from flopwright.planner.ranking import layout_ids
from flopwright.planner.regret import CLOSE, judge, regret, settled_plan, tuned_runs, tuned_space
from flopwright.planner.search import price
from flopwright.planner.space import legal_candidates
from flopwright.simulator.accuracy.published_files import load_published
from flopwright.simulator.accuracy.report_predict import calibration_of
from flopwright.simulator.accuracy.run_of_row import PublishedRun
from flopwright.simulator.training.candidates import Candidates


@pytest.fixture(scope="module")
def runs() -> tuple[PublishedRun, ...]:
    return tuned_runs(load_published().runs, "megatron_bridge")


def small(runs: tuple[PublishedRun, ...]) -> PublishedRun:
    return next(r for r in runs if r.model_name == "llama38b" and r.num_gpus == 8)


@pytest.mark.slow
def test_runs_of_one_framework_with_their_whole_split(runs: tuple[PublishedRun, ...]) -> None:
    assert len(runs) >= 8
    assert {r.stack.framework for r in runs} == {"megatron_bridge"}
    assert not any("own-plan" in r.flags for r in runs)


@pytest.mark.slow
def test_a_run_is_ranked_as_counting_all_plans_ranks_it(runs: tuple[PublishedRun, ...]) -> None:
    run = small(runs)
    found = judge(run)
    scenario = run.scenario.model_copy(update={"search": tuned_space(run)})
    calibration = calibration_of(run)
    every = price(scenario, legal_candidates(scenario), calibration)
    mine = price(scenario, Candidates.from_plans((run.plan,)), calibration)
    assert found.fits
    # time is priced in closed form here and replayed there; on one stage they are the same
    faster = every.fits & (every.step_time_s < mine.step_time_s[0] * (1 - 1e-9))
    best = np.unique(layout_ids(every.candidates)[faster])
    assert found.rank <= 1 + len(best)
    assert found.predicted_step_s == pytest.approx(float(mine.step_time_s[0]), rel=1e-6)


@pytest.mark.slow
def test_a_worse_plan_of_the_same_run_is_behind_and_says_what_is_better(
    runs: tuple[PublishedRun, ...],
) -> None:
    run = small(runs)
    good = judge(run)
    worse = replace(run, plan=run.plan.model_copy(update={"recompute": "full"}))
    found = judge(worse)
    assert found.behind > max(good.behind, CLOSE)
    assert found.rank > good.rank
    assert found.better
    assert all(1 / (1 - b.gain) - 1 > CLOSE for b in found.better)
    assert "recomput" in found.better[0].reason


@pytest.mark.slow
def test_a_split_that_does_not_fit_is_judged_with_what_it_must_have_recomputed(
    runs: tuple[PublishedRun, ...],
) -> None:
    run = small(runs)
    scenario = run.scenario.model_copy(update={"search": tuned_space(run)})
    calibration = calibration_of(run)
    assert settled_plan(run.plan, scenario, calibration) == run.plan
    batch = scenario.workload.global_batch_size
    wide = run.plan.model_copy(update={"micro_batch_size": batch // run.plan.dp})
    settled = settled_plan(wide, scenario, calibration)
    alone = price(scenario, Candidates.from_plans((wide,)), calibration)
    assert not alone.fits[0]
    if settled != wide:
        assert settled.recompute != "none"
        assert price(scenario, Candidates.from_plans((settled,)), calibration).fits[0]


def test_a_plan_that_cannot_be_is_skipped_with_its_reason(runs: tuple[PublishedRun, ...]) -> None:
    run = small(runs)
    broken = replace(run, id="broken", plan=run.plan.model_copy(update={"tp": 7}))
    found = regret([broken])
    assert not found.runs
    assert found.skipped[0][0] == "broken"
    assert "must divide the attention heads" in found.skipped[0][1]


@pytest.mark.slow
def test_the_verb_prints_the_totals_and_what_was_asked() -> None:
    shown = CliRunner().invoke(app, ["regret", "--only", "llama38b"])
    assert shown.exit_code == 0, shown.output
    assert "fit in our model:" in shown.output
    assert "asked: 80%" in shown.output
    data = CliRunner().invoke(app, ["regret", "--only", "llama38b", "--json", "-"])
    found = json.loads(data.output)
    assert all(run["model"] == "llama38b" for run in found["runs"])


@pytest.mark.slow
def test_no_run_of_that_kind_names_the_frameworks() -> None:
    shown = CliRunner().invoke(app, ["regret", "--framework", "megatron_brige"])
    assert isinstance(shown.exception, InputError)
    assert "megatron_bridge" in str(shown.exception)
