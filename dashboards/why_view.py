"""Why a plan is as it is: what binds it, what stands one choice away, what more would buy."""

from __future__ import annotations

import streamlit as st

from flopwright.dashboards import plan_figures
from flopwright.dashboards.parts import chart
from flopwright.dashboards.view import View
from flopwright.dashboards.working import work
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.plan_text import plan_words
from flopwright.planner.questions.explained import Explanation
from flopwright.spec.scenario import Scenario


def draw_why(view: View, scenario: Scenario, plan: ParallelPlan) -> None:
    """Draws why the plan and not its neighbours, once asked: it prices many plans."""
    whole = work(
        "explain",
        scenario,
        Explanation.model_validate,
        start="Price every plan one choice away",
        again="Price every plan one choice away",
        more=plan_words(plan),
        failed="This plan cannot be explained",
        plan=plan.to_data(),
    )
    if whole is None:
        return
    command = view.command("explain", "--plan", "plan.yaml")
    left, right = st.columns(2)
    with left:
        st.markdown("**What binds it**")
        st.markdown("\n".join(f"- {b.kind}: {b.text}" for b in whole.binding[:5]))
    with right:
        st.markdown("**What more would buy**")
        st.markdown("\n".join(f"- {p.what}: {p.text}" for p in whole.purchases))
    st.markdown("**Plans one choice away**")
    chart(plan_figures.neighbours_figure(whole.neighbours), alt="neighbours", command=command)
    st.dataframe(
        [
            {
                "change": n.change,
                "outcome": n.outcome,
                "slower (%)": None if n.behind is None else round(100 * n.behind, 1),
                "why": n.text,
            }
            for n in whole.neighbours
        ],
        hide_index=True,
        width="stretch",
    )
