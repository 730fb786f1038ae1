"""The report on measured public runs: its shape and coverage; errors are printed, not judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopwright.simulator.accuracy.report import AccuracyReport
from flopwright.simulator.accuracy.report_make import accuracy_report


@pytest.fixture(scope="module")
def report(measured_data: Path) -> AccuracyReport:
    return accuracy_report(measured_data / "validation" / "training_runs.csv", ("gpu",))


@pytest.mark.slow
def test_most_runs_in_scope_are_predicted(report: AccuracyReport) -> None:
    overall, cells = report.overall()
    assert overall.n > 400
    assert overall.coverage is not None
    assert overall.coverage >= 0.9
    assert cells.cells > 80
    print(f"median {overall.median_abs_error:.1%}, p90 {overall.p90_abs_error:.1%}")
    print(f"cells: {cells.median_abs_error:.1%}, {cells.p90_abs_error:.1%}")


@pytest.mark.slow
def test_every_prediction_is_a_positive_number_with_its_interval(report: AccuracyReport) -> None:
    for run in report.runs:
        assert 0 < run.low < run.predicted < run.high < float("inf"), run.id


@pytest.mark.slow
def test_composed_rows_are_no_headline(report: AccuracyReport) -> None:
    data = report.to_data()
    assert data["groups"]["vtrain-single"]["n"] == 720
    assert not any(r.labels["apart"] for r in report.headline())
    assert len({r.id for r in report.runs}) == len(report.runs)


@pytest.mark.slow
def test_every_skipped_row_has_a_reason(report: AccuracyReport) -> None:
    assert report.skipped
    assert all(s.reason for s in report.skipped)
    assert {s.in_scope for s in report.skipped} == {True, False}


@pytest.mark.slow
def test_baselines_are_scored_on_the_same_runs(report: AccuracyReport) -> None:
    ids = {r.id for r in report.headline()}
    for baseline in report.baselines.values():
        assert {r.id for r in baseline.runs} >= ids
    assert report.free_parameters == sum(report.parameters_by_level.values())
