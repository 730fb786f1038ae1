"""Compare: the store's runs, predicted against measured, before and after a calibration."""

from __future__ import annotations

import streamlit as st

from flopwright.dashboards import figures, tables
from flopwright.dashboards.parts import chart, chosen, keep_in_url, show_problems, store_url
from flopwright.dashboards.runs import calibrations, compared_runs
from flopwright.errors import InputError
from flopwright.report.compare_report import ComparisonReport, ErrorSummary
from flopwright.report.metrics import Measurement
from flopwright.store import default_url, open_store, store_exists
from flopwright.units import plural


def page() -> None:
    """Draws the page."""
    st.title("Compare")
    st.caption("Measured runs beside what the simulator predicts for the same plans.")
    try:
        if not store_exists(store_url()):
            _nothing_yet(store_url() or default_url())
            return
        store = open_store(store_url(), create=False)
        measurements = store.measurements()
        store.close()
    except InputError as error:
        show_problems(error, "The store cannot be opened")
        return
    if not measurements:
        _nothing_yet(store.url)
        return
    st.caption(f"{plural(len(measurements), 'run')} in {store.url}")
    _compared(measurements)


def _nothing_yet(url: str) -> None:
    """Says what to do when the store is empty."""
    st.info(f"**No runs yet** in {url}. A run adds its measurement:")
    st.code(
        "flopwright plan kimi_k2_mini_2cpu_fp32 --out plan.yaml\n"
        "flopwright run plan.yaml --out runs/mini\n"
        "flopwright calibrate",
        language="bash",
    )
    st.caption("Or `make demo`, which does all of it for three plans.")


def _compared(measurements: list[Measurement]) -> None:
    """Shows the comparison under the chosen calibration."""
    try:
        known = calibrations(measurements)
        name = chosen("Calibration", list(known), "calibration")
        report = compared_runs(measurements, known[name])
    except InputError as error:
        show_problems(error, "These runs cannot be predicted")
        return
    keep_in_url(calibration=name)
    if len(report.runs) < len(measurements):
        st.caption(
            f"{plural(len(report.runs), 'run')} of the stack that this calibration speaks of."
        )
    store = ["--store", str(store_url())] if store_url() is not None else []
    command = ["flopwright", "compare", "--calibration", name, *store]
    _summary(report)
    st.dataframe(tables.compared(report), hide_index=True, width="stretch")
    st.subheader("Predicted against measured step time")
    after = [run.after for run in report.runs]
    before = [run.before for run in report.runs if run.before is not None]
    figure = figures.scatter_figure(after, before)
    chart(figure, alt="predicted against measured", command=command)
    _one_run(report, command)


def _summary(report: ComparisonReport) -> None:
    """Shows the errors before and after, and of the runs that were not learnt from."""
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
    columns[-1].metric("noise floor", "not measured" if floor is None else f"{floor:.1%}")
    columns[-1].caption("one plan measured twice: smaller errors say nothing")


def _one_run(report: ComparisonReport, command: list[str]) -> None:
    """Shows one run by class: where its prediction is off."""
    st.subheader("One run by class")
    labels = {f"{run.plan_name} ({run.measurement_id})": run.after for run in report.runs}
    label = chosen("Run", list(labels), "run")
    keep_in_url(run=label)
    comparison = labels[label]
    if comparison.worst is not None:
        st.markdown(f"Look first at {comparison.worst.text}.")
    left, right = st.columns(2)
    with left:
        figure = figures.classes_figure(comparison.time_classes, kind="time")
        chart(figure, alt="time by class", command=command)
    with right:
        if not comparison.memory_classes:
            st.info("No memory was recorded in this run.")
            return
        figure = figures.classes_figure(comparison.memory_classes, kind="memory")
        chart(figure, alt="memory by class", command=command)
