"""Compare: the store's runs beside what the simulator predicts, and what is off and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pandas as pd
import streamlit as st

from flopwright.dashboards import compare_figures, figures, parts, tables
from flopwright.dashboards.compare_view import (
    draw_environment,
    draw_left_out,
    draw_one_run,
    draw_summary,
)
from flopwright.dashboards.parts import chart, chosen, keep_in_url, open_tab, show_problems
from flopwright.dashboards.published_view import draw_published
from flopwright.dashboards.runs import calibrations, chosen_runs, compared_runs, holding
from flopwright.errors import InputError
from flopwright.report.compare_report import ComparisonReport
from flopwright.report.drift import find_drifts
from flopwright.report.metrics import Measurement
from flopwright.store import default_url, open_store, store_exists
from flopwright.units import plural

_RUNS, _ONE, _WHERE, _TIME = "Runs", "One run", "Environment", "Over time"
_ROUNDS, _PUBLISHED = "Rounds and stages", "Published runs"
_TABS: Final = (_RUNS, _ONE, _WHERE, _TIME, _ROUNDS, _PUBLISHED)


def page() -> None:
    """Draws the page."""
    st.title("Compare")
    st.caption("Measured runs beside what the simulator predicts for the same plans.")
    try:
        if not store_exists(parts.store_url()):
            _nothing_yet(parts.store_url() or default_url())
            return
        store = open_store(parts.store_url(), create=False)
        measurements, stored = store.measurements(), store.frame()
        store.close()
    except InputError as error:
        show_problems(error, "The store cannot be opened")
        return
    if stored.empty:
        _nothing_yet(store.url)
        return
    st.caption(f"{plural(len(measurements), 'run')} in {store.url}")
    words = st.text_input(
        "Search runs",
        st.query_params.get("search", ""),
        key="search runs",
        placeholder="plan, id, model, stack or date",
        help="runs whose plan name, id, date, model or stack holds every word",
    )
    keep_in_url(search=words)
    name, place = open_tab(_TABS, "tab")
    with place:
        _shown(name, chosen_runs(measurements, words), stored, words)


def _nothing_yet(url: str) -> None:
    """Says what to do when the store is empty; the published runs can be looked at anyway."""
    st.info(f"**No runs yet** in {url}. A run adds its measurement:")
    st.code(
        "flopwright plan kimi_k2_mini_2cpu_fp32 --out plan.yaml\n"
        "flopwright run plan.yaml --out runs/mini\n"
        "flopwright calibrate",
        language=None,
    )
    st.caption("Or `make demo`, which does all of it for three plans.")
    st.subheader("Runs that others published")
    draw_published()


def _shown(name: str, steps: Sequence[Measurement], stored: pd.DataFrame, words: str) -> None:
    """Draws one of the tabs over the runs that were searched for."""
    if name == _PUBLISHED:
        draw_published()
    elif name == _ROUNDS:
        _others(holding(tables.rounds_and_stages(stored), words))
    elif not steps:
        if words:
            st.warning(f"No run holds all of: {words}")
        else:
            st.info("No step of a training is in the store.")
    elif name == _TIME:
        _drift(steps)
    elif name == _WHERE:
        draw_environment(steps)
    else:
        _against(name, steps)


def _others(others: pd.DataFrame) -> None:
    if len(others):
        st.dataframe(others, hide_index=True, width="stretch")
        figure = compare_figures.rounds_figure(others)
        chart(figure, alt="rounds and stages", command=["flopwright", "store", "show"])
    else:
        st.info("No rollout round and no stage of a campaign is in the store, or none is found.")


def _against(name: str, steps: Sequence[Measurement]) -> None:
    """Draws the runs, or one of them, against their predictions under a calibration."""
    try:
        known = calibrations(steps)
        calibration = chosen("Calibration", list(known), "calibration")
        keep_in_url(calibration=calibration)
        report, left_out = compared_runs(steps, known[calibration])
    except InputError as error:
        show_problems(error, "These runs cannot be predicted")
        return
    if not report.runs:
        st.warning("No run of the stack that this calibration speaks of.")
        return
    draw_left_out(left_out, len(report.runs), len(steps))
    command = ["flopwright", "compare", "--calibration", calibration]
    command += [word for plan in left_out for word in ("--exclude", plan)]
    command += [] if parts.store_url() is None else ["--store", str(parts.store_url())]
    if name == _ONE:
        draw_one_run(report, command)
    else:
        _all(report, command)


def _all(report: ComparisonReport, command: list[str]) -> None:
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


def _drift(steps: Sequence[Measurement]) -> None:
    """Draws the step times of each plan over its runs, and what drifted."""
    for drift in find_drifts(steps):
        (st.error if drift.alarm else st.caption)(drift.text())
    figure = compare_figures.over_time_figure(steps)
    chart(figure, alt="step time over runs", command=["flopwright", "compare"])
