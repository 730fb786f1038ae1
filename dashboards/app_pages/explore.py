"""Explore: does a scenario fit, how fast, how dear, what binds it, and what else there is."""

from __future__ import annotations

from typing import Final

import streamlit as st

from flopwright.dashboards.explored import draw_nothing_fits, draw_plans, draw_verdict
from flopwright.dashboards.parts import show_problems
from flopwright.dashboards.results import first_look, found, whole_search
from flopwright.dashboards.scaling import draw_scaling, draw_sensitivities
from flopwright.dashboards.scenario_form import scenario_form
from flopwright.dashboards.serving_view import draw_serving
from flopwright.dashboards.view import View
from flopwright.errors import InputError
from flopwright.planner.result import SearchResult

_STOP: Final = "stopped"
_TABS: Final = ("Plans", "What holds it back", "Scaling", "Serving")


def page() -> None:
    """Draws the page."""
    st.title("Explore")
    st.caption("Every legal split of a training step, priced: which fit, and which is fastest.")
    beside = st.toggle(
        "Two scenarios side by side",
        value="b_scenario" in st.query_params,
        help="the second one has its own form and its own address keys",
    )
    if not beside:
        for key in ("b_scenario", "b_set"):
            st.query_params.pop(key, None)
        _explored("", wide=True)
        return
    left, right = st.columns(2)
    with left:
        _explored("", wide=False)
    with right:
        _explored("b_", wide=False)


def _explored(slot: str, *, wide: bool) -> None:
    """Draws the form and what the search says of the scenario."""
    try:
        view = scenario_form(slot)
        scenario = view.scenario()
        st.download_button(
            "Download this scenario (YAML)",
            view.yaml(),
            file_name=f"{scenario.name}.yaml",
            mime="application/yaml",
            key=f"{slot}download",
        )
        result = found(scenario)
        if result is not None:
            _drawn(result, view, wide=wide)
            return
        quick = first_look(scenario)
    except InputError as error:
        show_problems(error, "This scenario cannot be planned")
        return
    if quick is not None:
        _drawn(quick, view, wide=wide)
    _search_now(view)


def _drawn(result: SearchResult, view: View, *, wide: bool) -> None:
    scenario = view.scenario()
    draw_verdict(result, view, wide=wide)
    if result.best is None:
        draw_nothing_fits(result, view)
        return
    # Serving is no question about a training scenario: one tab of it is enough.
    names = _TABS if wide else _TABS[:-1]
    tabs = dict(zip(names, st.tabs(names), strict=True))
    with tabs["Plans"]:
        draw_plans(result, view, wide=wide)
    with tabs["What holds it back"]:
        draw_sensitivities(result, scenario, view)
    with tabs["Scaling"]:
        draw_scaling(scenario, view)
    if "Serving" in tabs:
        with tabs["Serving"]:
            _serving(scenario.model.name)


def _serving(model: str) -> None:
    try:
        draw_serving(model)
    except InputError as error:
        show_problems(error, "This model cannot be served so")


def _search_now(view: View) -> None:
    """Searches every plan under a progress bar; any other action on the page ends it."""
    scenario = view.scenario()
    asked = f"{view.slot}{_STOP}"
    if st.session_state.get(asked) == scenario.content_hash():
        if st.button("Search every plan", key=f"{view.slot}go on"):
            del st.session_state[asked]
            st.rerun()
        return
    bar = st.progress(0.0, "searching every legal plan; what stands above is a first look")
    if st.button("Stop", key=f"{view.slot}stop"):
        st.session_state[asked] = scenario.content_hash()
        st.rerun()

    def advance(done: int, total: int) -> None:
        # Streamlit ends a run that was superseded at its next call: this one.
        bar.progress(min(1.0, done / max(1, total)), f"{done:,} of {total:,} plans priced")

    try:
        whole_search(scenario, advance)
    except InputError as error:
        show_problems(error, "This scenario cannot be planned")
        return
    st.rerun()
