"""Plan: one plan in depth: its timeline, memory, traffic, why it is so, and what an edit does."""

from __future__ import annotations

import streamlit as st

from flopwright.dashboards import plan_figures
from flopwright.dashboards.depth import Depth, depth, explained, perfetto, plan_file
from flopwright.dashboards.edit import draw_edit
from flopwright.dashboards.parts import chart, cli_line, show_problems
from flopwright.dashboards.plan_choice import chosen_plan
from flopwright.dashboards.view import View
from flopwright.errors import InputError
from flopwright.planner.plan_text import plan_words
from flopwright.spec.load import dump_yaml
from flopwright.spec.scenario import Scenario
from flopwright.units import show_bytes, show_count, show_percent, show_seconds

_FILE = "plan.yaml"


def page() -> None:
    """Draws the page."""
    st.title("Plan")
    st.caption("One plan in depth: what each stage does when, what it holds and what it sends.")
    try:
        choice = chosen_plan()
        if choice is None:
            return
        view, scenario, plan = choice
        with st.spinner("simulating the step"):
            found = depth(scenario, plan)
    except InputError as error:
        show_problems(error, "This plan cannot be priced")
        return
    _head(found, scenario)
    _files(found, scenario)
    command = view.command("simulate", "--plan", _FILE, "--engine", "replay")
    timeline, memory, traffic, why, edit = st.tabs(
        ["Timeline", "Memory", "Communication", "Why this plan", "Edit a field"]
    )
    with timeline:
        st.caption("A row a pipeline stage. Drag to zoom in, double-click to zoom out.")
        figure = plan_figures.timeline_figure(found.step.trace, found.step.step_time_s)
        chart(figure, alt="timeline of a step", command=[*command, "--trace", "t.json.gz"])
    with memory:
        capacity_bytes = scenario.cluster.node.gpu.hbm_bytes
        figure = plan_figures.memory_timeline_figure(
            found.step.memory, capacity_bytes, found.step.step_time_s
        )
        chart(figure, alt="memory through a step", command=command)
    with traffic:
        if found.comm_bytes:
            st.caption("What one rank of the busiest stage sends in a step.")
            figure = plan_figures.comm_figure(found.comm_bytes)
            chart(figure, alt="traffic by group", command=view.command("plan", "--json"))
        else:
            st.info("One rank sends nothing.")
    with why:
        _why(view, scenario, found)
    with edit:
        draw_edit(view, scenario, plan)


def _head(found: Depth, scenario: Scenario) -> None:
    """Draws the plan's numbers, whether it fits first."""
    metrics, interval = found.prediction.metrics, found.prediction.step_time_interval
    hbm_bytes = scenario.cluster.node.gpu.hbm_bytes
    free = hbm_bytes - metrics.peak_memory_bytes
    text = f"**{found.plan.label()}** on {found.plan.world_size:,} ranks: "
    if free >= 0:
        st.success(f"{text}fits, {show_bytes(free)} of {show_bytes(hbm_bytes)} free")
    else:
        st.error(f"{text}does not fit, lacks {show_bytes(-free)} a GPU")
    columns = st.columns(4)
    columns[0].metric("step time", show_seconds(metrics.step_time_s))
    low, high = show_seconds(interval.low), show_seconds(interval.high)
    columns[0].caption(f"{low} to {high} at 80 %")
    columns[1].metric("tokens/s a GPU", show_count(metrics.tokens_per_s_per_gpu))
    columns[2].metric("MFU", f"{metrics.mfu:.1%}")
    columns[2].caption(f"provenance: {found.prediction.provenance}")
    columns[3].metric("bubble", show_percent(found.step.bubble))


def _files(found: Depth, scenario: Scenario) -> None:
    """Draws the downloads, and how the command line gets the same plan."""
    left, right = st.columns(2)
    text = dump_yaml(plan_file(scenario, found.plan), header="Downloaded from the dashboard.")
    left.download_button(f"Download {_FILE}", text, file_name=_FILE, mime="application/yaml")
    right.download_button(
        "Download the timeline (opens in ui.perfetto.dev)",
        perfetto(found),
        file_name="predicted.trace.json.gz",
        mime="application/gzip",
    )


def _why(view: View, scenario: Scenario, found: Depth) -> None:
    """Draws what binds the plan and why not its neighbours, once asked: it prices many plans."""
    state = f"why {plan_words(found.plan)}"
    if not st.session_state.get(state):
        if not st.button("Price every plan one choice away"):
            return
        st.session_state[state] = True
    with st.spinner("pricing the neighbours"):
        whole = explained(scenario, found.plan)
    st.markdown("**What binds it**")
    st.markdown("\n".join(f"- {b.kind}: {b.text}" for b in whole.binding[:5]))
    st.markdown("**Plans one choice away**")
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
    st.markdown("**What more would buy**")
    st.markdown("\n".join(f"- {p.what}: {p.text}" for p in whole.purchases))
    cli_line(view.command("explain", "--plan", _FILE))
