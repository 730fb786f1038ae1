"""Compare: the store's runs beside what the simulator predicts, and what is off and why."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from flopwright.dashboards import compare_figures, figures, tables
from flopwright.dashboards.compare_view import draw_environment, draw_one_run, draw_summary
from flopwright.dashboards.parts import chart, chosen, keep_in_url, show_problems, store_url
from flopwright.dashboards.published_view import draw_published
from flopwright.dashboards.runs import calibrations, chosen_runs, compared_runs
from flopwright.errors import InputError
from flopwright.report.drift import find_drifts
from flopwright.report.metrics import Measurement
from flopwright.store import default_url, open_store, store_exists
from flopwright.units import plural

_TABS = ("Runs", "One run", "Environment", "Over time", "Rounds and stages", "Published runs")


def page() -> None:
    """Draws the page."""
    st.title("Compare")
    st.caption("Measured runs beside what the simulator predicts for the same plans.")
    try:
        if not store_exists(store_url()):
            _nothing_yet(store_url() or default_url())
            return
        store = open_store(store_url(), create=False)
        measurements, stored = store.measurements(), store.frame()
        store.close()
    except InputError as error:
        show_problems(error, "The store cannot be opened")
        return
    if stored.empty:
        _nothing_yet(store.url)
        return
    st.caption(f"{plural(len(measurements), 'run')} in {store.url}")
    _compared(measurements, tables.rounds_and_stages(stored))


def _nothing_yet(url: str) -> None:
    """Says what to do when the store is empty; the published runs can be looked at anyway."""
    st.info(f"**No runs yet** in {url}. A run adds its measurement:")
    st.code(
        "flopwright plan kimi_k2_mini_2cpu_fp32 --out plan.yaml\n"
        "flopwright run plan.yaml --out runs/mini\n"
        "flopwright calibrate",
        language="bash",
    )
    st.caption("Or `make demo`, which does all of it for three plans.")
    st.subheader("Runs that others published")
    draw_published()


def _compared(steps: Sequence[Measurement], others: pd.DataFrame) -> None:
    """Shows the comparison under the chosen calibration, and what else is stored."""
    runs, one, environment, time, rounds, published = st.tabs(_TABS)
    with published:
        draw_published()
    with rounds:
        if len(others):
            st.dataframe(others, hide_index=True, width="stretch")
        else:
            st.info("No rollout round and no stage of a campaign is in the store.")
    with time:
        _drift(steps)
    with environment:
        draw_environment(steps)
    with runs:
        report_of = _runs(steps)
    if report_of is None:
        return
    with one:
        draw_one_run(*report_of)


def _runs(steps: Sequence[Measurement]) -> tuple[object, list[str]] | None:
    """Draws all runs; returns the report and the command line for it."""
    if not steps:
        st.info("No step of a training is in the store.")
        return None
    try:
        known = calibrations(steps)
        left, right = st.columns(2)
        with left:
            name = chosen("Calibration", list(known), "calibration")
        with right:
            st.session_state.setdefault("search runs", st.query_params.get("search", ""))
            words = st.text_input(
                "Search runs",
                key="search runs",
                placeholder="plan, id, stack or date",
                help="runs whose plan name, id, date, model or stack holds every word",
            )
        keep_in_url(calibration=name, search=words)
        wanted = chosen_runs(steps, words)
        if not wanted:
            st.warning(f"No run holds all of: {words}")
            return None
        report = compared_runs(wanted, known[name])
    except InputError as error:
        show_problems(error, "These runs cannot be predicted")
        return None
    if not report.runs:
        st.warning("No run of the stack that this calibration speaks of.")
        return None
    if len(report.runs) < len(wanted):
        st.caption(
            f"{plural(len(report.runs), 'run')} of the stack that this calibration speaks of."
        )
    store = ["--store", str(store_url())] if store_url() is not None else []
    command = ["flopwright", "compare", "--calibration", name, *store]
    draw_summary(report)
    st.dataframe(tables.compared(report), hide_index=True, width="stretch")
    left, right = st.columns(2)
    after = [run.after for run in report.runs]
    before = [run.before for run in report.runs if run.before is not None]
    with left:
        st.subheader("Predicted against measured step time")
        figure = figures.scatter_figure(after, before)
        chart(figure, alt="predicted against measured", command=command)
    with right:
        st.subheader("Signed error by phase")
        figure = compare_figures.phase_error_figure(report)
        chart(figure, alt="signed error by phase", command=command)
    return report, command


def _drift(steps: Sequence[Measurement]) -> None:
    """Draws the step times of each plan over its runs, and what drifted."""
    for drift in find_drifts(steps):
        (st.error if drift.alarm else st.caption)(drift.text())
    figure = compare_figures.over_time_figure(steps)
    chart(figure, alt="step time over runs", command=["flopwright", "compare"])
