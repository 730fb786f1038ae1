"""How far the predictions are off on runs that others published and that ship with the tool."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from flopwright.dashboards import compare_figures
from flopwright.dashboards.parts import chart
from flopwright.simulator.accuracy.report import AccuracyReport
from flopwright.simulator.accuracy.report_make import accuracy_report


def _report() -> AccuracyReport:
    return accuracy_report(None, ("gpu",))


_PUBLISHED: Callable[[], AccuracyReport] = st.cache_resource(
    show_spinner="predicting the published runs"
)(_report)


def draw_published() -> None:
    """Draws the errors on the published runs, once asked: it predicts more than a hundred."""
    state = "published asked"
    if not st.session_state.get(state):
        if not st.button("Predict the published runs"):
            st.caption("Some seconds; the table of the README is made by the same function.")
            return
        st.session_state[state] = True
    report = _PUBLISHED()
    score, _ = report.overall()
    columns = st.columns(3)
    columns[0].metric("median error", _share(score.median_abs_error))
    columns[0].caption(f"{len(report.headline())} runs")
    columns[1].metric("9 of 10 within", _share(score.p90_abs_error))
    columns[2].metric("bias", _share(score.bias, "+.1%"))
    figure = compare_figures.published_figure(report.headline())
    chart(figure, alt="published runs", command=["flopwright", "accuracy", "--by", "gpu"])


def _share(value: float | None, form: str = ".1%") -> str:
    return "-" if value is None else format(value, form)
