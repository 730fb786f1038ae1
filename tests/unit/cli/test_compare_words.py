"""The tables of `flopwright compare`: columns are named for what they hold."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flopwright.cli._compare_view import show
from flopwright.dashboards.tables import compared
from flopwright.report.compare import Comparison, MetricComparison
from flopwright.report.compare_report import ComparedRun, ComparisonReport, make_report
from flopwright.report.metrics import Interval


def _comparison(calibration: str, predicted: float, provenance: str) -> Comparison:
    return Comparison.model_validate(
        {
            "plan_name": "dp2",
            "measurement_id": "m",
            "calibration_id": calibration,
            "provenance": provenance,
            "interval": Interval(low=0.5, high=2.0, probability=0.8),
            "metrics": (
                MetricComparison(
                    metric="step_time_s",
                    unit="s",
                    predicted=predicted,
                    measured=1.0,
                    signed_error=predicted - 1,
                    in_interval=True,
                ),
            ),
            "time_classes": (),
            "memory_classes": (),
        }
    )


def _report(*, calibrated: bool) -> ComparisonReport:
    prior = _comparison("prior-cpu", 0.7, "analytic")
    learnt = _comparison("cal-1", 0.98, "calibrated")
    runs = [
        ComparedRun(
            plan_name=name,
            measurement_id=name,
            held_out=name == "b" or not calibrated,
            before=prior if calibrated else None,
            after=learnt if calibrated else prior,
        )
        for name in ("a", "b")
    ]
    return make_report(runs)


def _shown(report: ComparisonReport, width: int = 130) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width), report)
    return out.getvalue()


def test_without_a_calibration_there_is_one_prediction() -> None:
    text = _shown(_report(calibrated=False))
    assert "predicted by the public prior prior-cpu" in text
    header = next(line for line in text.splitlines() if "measured" in line and "plan" in line)
    assert "predicted" in header
    for word in ("before", "after", "learnt from"):
        assert word not in text


def test_with_one_the_title_says_which_is_which() -> None:
    text = _shown(_report(calibrated=True))
    assert "before: prior-cpu, after: cal-1" in text
    assert "after, runs not learnt from" in text
    by_plan = {line.split("│")[1].strip(): line for line in text.splitlines() if "│" in line}
    assert " yes " in by_plan["a"]
    assert " no " in by_plan["b"]


def test_the_dashboard_says_the_same_of_a_run() -> None:
    pytest.importorskip("pandas")
    frame = compared(_report(calibrated=True))
    assert list(frame["learnt from"]) == ["yes", "no"]


def test_the_tables_fold() -> None:
    text = _shown(_report(calibrated=True), width=70)
    assert max(map(len, text.splitlines())) <= 70
