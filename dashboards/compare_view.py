"""Parts of the Compare page: the summary, one run in depth, what differs between machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from flopwright.dashboards import compare_figures, figures
from flopwright.dashboards.parts import chart, chosen, keep_in_url
from flopwright.report.compare import Comparison
from flopwright.report.compare_report import ComparisonReport, ErrorSummary
from flopwright.report.metrics import Measurement
from flopwright.units import plural


def draw_summary(report: ComparisonReport) -> None:
    """Draws the errors before and after, and of the runs that were not learnt from."""
    shown: list[tuple[str, ErrorSummary | None]] = [("median error", report.after)]
    if report.before is not None:
        shown = [
            ("median error before", report.before),
            ("median error after", report.after),
            ("median error, runs not learnt from", report.held_out),
        ]
    columns = st.columns(len(shown) + 1)
    for column, (title, summary) in zip(columns, shown, strict=False):
        column.metric(title, "-" if summary is None else f"{summary.median_error:.1%}")
        if summary is not None:
            inside = f"{summary.inside_interval:.0%} inside the interval"
            column.caption(f"{plural(summary.runs, 'run')}, {inside}")
    floor = report.noise_floor
    columns[-1].metric("noise floor", "-" if floor is None else f"{floor:.1%}")
    known = "no plan" if floor is None else "one plan"
    columns[-1].caption(f"{known} measured twice in a launch: errors below it say nothing")


def draw_left_out(left_out: Mapping[str, str], shown: int, of: int) -> None:
    """Names the runs that cannot be predicted, by the rule that stands against them.

    Args:
        shown, of: runs that are compared, of all that were searched for.
    """
    by_rule: dict[str, list[str]] = {}
    for plan, rule in left_out.items():
        by_rule.setdefault(rule, []).append(plan)
    for rule, plans in by_rule.items():
        st.warning(f"**Left out: {', '.join(plans)}.** {rule[:1].upper()}{rule[1:]}.")
    if shown < of:
        st.caption(f"{plural(shown, 'run')} of the stack that this calibration speaks of.")


def draw_one_run(report: Any, command: list[str]) -> None:
    """Draws one run: what stands out, the two parts of its error, classes, ranks and links."""
    assert isinstance(report, ComparisonReport)
    labels = {f"{run.plan_name} ({run.measurement_id})": run.after for run in report.runs}
    label = chosen("Run", list(labels), "run")
    keep_in_url(run=label)
    found = labels[label]
    if found.worst is not None:
        st.markdown(f"Look first at {found.worst.text}.")
    for finding in found.findings[1:4]:
        st.caption(f"then {finding.text}")
    _split(found)
    left, right = st.columns(2)
    with left:
        figure = figures.classes_figure(found.time_classes, kind="time")
        chart(figure, alt="time by class", command=command)
    with right:
        if found.memory_classes:
            figure = figures.classes_figure(found.memory_classes, kind="memory")
            chart(figure, alt="memory by class", command=command)
        else:
            st.info("No memory was recorded in this run.")
    if found.ranks:
        figure = compare_figures.ranks_figure(found.ranks)
        chart(figure, alt="compute and traffic by rank", command=command)
    if found.links:
        st.dataframe(
            [
                {
                    "link": f"{row.cls} {' > '.join(map(str, row.ranks))}",
                    "predicted (ms)": float(f"{1e3 * row.predicted_s:.4g}"),
                    "measured (ms)": float(f"{1e3 * row.measured_s:.4g}"),
                }
                for row in found.links
            ],
            hide_index=True,
            width="stretch",
        )


def _split(found: Comparison) -> None:
    """Draws the signed error in its two parts."""
    if found.split is None:
        return
    error = found.error("step_time_s")
    columns = st.columns(3)
    columns[0].metric("step time error", "-" if error is None else f"{error:+.1%}")
    columns[1].metric("of it: cost of the parts", f"{found.split.cost:+.1%}")
    columns[1].caption(f"what actions were thought to take, by the run's own {found.split.basis}")
    columns[2].metric("of it: structure", f"{found.split.structure:+.1%}")
    columns[2].caption("waiting, overlap, and what no action holds")


def draw_environment(steps: Sequence[Measurement]) -> None:
    """Draws what differs between the hardware and software of two runs."""
    if len(steps) < 2:
        st.info("Two runs are needed to compare where they ran.")
        return
    labels = {f"{m.plan_name} ({m.id})": m for m in steps}
    left, right = st.columns(2)
    with left:
        one = labels[chosen("First run", list(labels), "first")]
    with right:
        other = labels[chosen("Second run", list(reversed(labels)), "second")]
    rows = environment_rows(one, other)
    if rows:
        st.dataframe(rows, hide_index=True, width="stretch")
    else:
        st.success("The same hardware and software: their calibrations are the same.")


def environment_rows(one: Measurement, other: Measurement) -> list[dict[str, str]]:
    """Returns the fields of the fingerprints that differ, packages one by one."""
    first, second = _flat(one), _flat(other)
    names = [*first, *(name for name in second if name not in first)]
    return [
        {"": name, "first run": first.get(name, "-"), "second run": second.get(name, "-")}
        for name in names
        if first.get(name) != second.get(name)
    ]


def _flat(run: Measurement) -> dict[str, str]:
    data = run.fingerprint.to_data()
    packages = data.pop("packages", {})
    return {k: str(v) for k, v in data.items()} | {k: str(v) for k, v in packages.items()}
