"""Explore: does a scenario fit, how fast, how dear, what binds it, and what else there is."""

from __future__ import annotations

from typing import Final

import streamlit as st

from flopwright.dashboards.explored import draw_nothing_fits, draw_plans, draw_verdict
from flopwright.dashboards.parts import open_tab, show_problems
from flopwright.dashboards.results import first_look, found, whole_search
from flopwright.dashboards.scaling import draw_scaling, draw_sensitivities
from flopwright.dashboards.scenario_form import scenario_form
from flopwright.dashboards.serving_view import draw_serving
from flopwright.dashboards.view import View
from flopwright.errors import InputError
from flopwright.planner.result import SearchResult

_PLANS, _HOLDS, _SCALING, _SERVING = "Plans", "What holds it back", "Scaling", "Serving"
_TABS: Final = (_PLANS, _HOLDS, _SCALING, _SERVING)


def page() -> None:
    """Draws the page."""
    st.title("Explore")
    st.caption("Every legal split of a training step, priced: which fit, and which is fastest.")
    beside = st.toggle(
        "Two scenarios side by side",
        value="b_scenario" in st.query_params,
        key="beside",
        help="the second one has its own form and its own address keys",
    )
    if not beside:
        for key in ("b_scenario", "b_set", "b_plan"):
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
        result = found(scenario)
        first = None if result is not None else first_look(scenario)
    except InputError as error:
        show_problems(error, "This scenario cannot be planned")
        return
    shown = result or first
    if shown is None:
        st.info("No plan of a first look fits: every legal plan is being priced.")
        whole_search(scenario, slot)
        return
    say_what_binds = draw_verdict(shown, view, wide=wide)
    if result is None:
        whole_search(scenario, slot)
    _drawn(shown, view, wide=wide)
    say_what_binds()


def _drawn(result: SearchResult, view: View, *, wide: bool) -> None:
    """Draws one of the tabs: what is not looked at is not worked out."""
    if result.best is None:
        draw_nothing_fits(result, view)
        return
    # Serving is no question about a training scenario: one tab of it is enough.
    names = _TABS if wide else _TABS[:-1]
    name, place = open_tab(names, f"{view.slot}tab")
    with place:
        if name == _PLANS:
            draw_plans(result, view, wide=wide)
        elif name == _HOLDS:
            draw_sensitivities(result, view)
        elif name == _SCALING:
            draw_scaling(view)
        else:
            _serving(view.scenario().model.name)


def _serving(model: str) -> None:
    try:
        draw_serving(model)
    except InputError as error:
        show_problems(error, "This model cannot be served so")
