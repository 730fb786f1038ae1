"""How far the predictions are off on runs that others published and that ship with the tool."""

from __future__ import annotations

from typing import Final

import streamlit as st

from flopwright.dashboards import compare_figures
from flopwright.dashboards.parts import chart
from flopwright.simulator.accuracy.report import AccuracyReport
from flopwright.simulator.accuracy.report_make import accuracy_report

# The report of this server, once somebody asked: what ships does not change meanwhile.
_KEPT: Final[list[AccuracyReport]] = []
_ASKED: Final = "published asked"


def draw_published() -> None:
    """Draws the errors on the published runs, once asked: it predicts more than a hundred."""
    if not _KEPT:
        if not st.session_state.get(_ASKED):
            st.caption("Some seconds; the table of the README is made by the same function.")
            if not st.button("Predict the published runs"):
                return
            st.session_state[_ASKED] = True
        _predict()
    report = _KEPT[0]
    score, _ = report.overall()
    columns = st.columns(3)
    columns[0].metric("median error", _share(score.median_abs_error))
    columns[0].caption(f"{len(report.headline())} runs")
    columns[1].metric("9 of 10 within", _share(score.p90_abs_error))
    columns[2].metric("bias", _share(score.bias, "+.1%"))
    figure = compare_figures.published_figure(report.headline())
    chart(figure, alt="published runs", command=["flopwright", "accuracy", "--by", "gpu"])


def _predict() -> None:
    """Predicts the runs under a progress bar, and draws the page anew."""
    left, right = st.columns([8, 1], vertical_alignment="bottom")
    bar = left.progress(0.0, "predicting the published runs")
    if right.button("Stop", help="end this work"):
        st.session_state[_ASKED] = False
        st.rerun()

    def advance(done: int, total: int) -> None:
        # A press of Stop ends the script here: at the next thing it draws.
        bar.progress(min(1.0, done / max(1, total)), f"{done:,} of {total:,} runs predicted")

    _KEPT[:] = [accuracy_report(None, ("gpu",), advance=advance)]
    st.rerun()


def _share(value: float | None, form: str = ".1%") -> str:
    return "-" if value is None else format(value, form)
