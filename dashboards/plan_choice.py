"""Which plan a page is about: the address names its scenario and its words."""

from __future__ import annotations

from typing import Final

import streamlit as st

from flopwright.dashboards.parts import keep_in_url
from flopwright.dashboards.results import first_look, found
from flopwright.dashboards.scenario_form import FIRST
from flopwright.dashboards.view import View, view_of_address
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.plan_text import plan_from_text, plan_words
from flopwright.spec.load import SCENARIO_CATALOG, catalog_names
from flopwright.spec.scenario import Scenario

# Where a session keeps the plan it was last about: links between pages do not carry it.
_LAST: Final = "last plan"


def chosen_plan() -> tuple[View, Scenario, ParallelPlan] | None:
    """Returns the view, its scenario and the plan; None where nothing fits (and says so).

    Raises:
        InputError: the address names a plan or changes that cannot be.
    """
    shown = view_of_address() or View(FIRST)
    names = catalog_names(SCENARIO_CATALOG)
    if shown.name in names:
        first = names.index(shown.name)
        name = str(st.selectbox("Scenario", names, index=first, key="choice plan's scenario"))
        if name != shown.name:
            shown = View(name)
            st.query_params.pop("plan", None)
    else:
        st.info("The uploaded scenario of the Explore page.")
    shown.keep()
    if shown.words:
        st.caption("with " + ", ".join(f"`{word}`" for word in shown.words))
    scenario = shown.scenario()
    text = st.query_params.get("plan") or _last_of(shown)
    if "=" in text:
        plan = plan_from_text(text, scenario)
    else:
        result = found(scenario) or first_look(scenario)
        best = None if result is None else result.best
        if best is None:
            st.warning("No plan of a first look fits. Search every plan on the Explore page.")
            return None
        plan = best.plan
    plan = _edited(plan, scenario)
    st.session_state[_LAST] = (shown, plan_words(plan))
    return shown, scenario, plan


def _last_of(shown: View) -> str:
    """Returns the words of the plan that this session last had of a view; "" without one."""
    view, words = st.session_state.get(_LAST, (None, ""))
    return words if view == shown else ""


def _edited(plan: ParallelPlan, scenario: Scenario) -> ParallelPlan:
    """Returns the plan of the text box, which starts at the given one."""
    words = st.text_input(
        "Plan",
        plan_words(plan),
        key=f"words {scenario.name} {plan_words(plan)}",
        help="fields of the plan as NAME=VALUE words; a name alone is on; dp takes what is left",
    )
    chosen = plan_from_text(words, scenario)
    keep_in_url(plan=plan_words(chosen))
    if chosen != plan:
        st.rerun()  # the box of the new plan takes this one's place: what it is given next counts
    return chosen
