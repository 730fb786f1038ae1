"""Plan: one plan in depth: its timeline, memory, traffic, why it is so, and what an edit does."""

from __future__ import annotations

from typing import Final

import streamlit as st

from flopwright.dashboards import plan_figures
from flopwright.dashboards.depth import Depth, depth, perfetto, plan_file
from flopwright.dashboards.edit import draw_edit
from flopwright.dashboards.parts import chart, open_tab, show_problems
from flopwright.dashboards.plan_choice import chosen_plan
from flopwright.dashboards.view import View
from flopwright.dashboards.why_view import draw_why
from flopwright.errors import InputError
from flopwright.spec.load import dump_yaml
from flopwright.spec.scenario import Scenario
from flopwright.units import show_bytes, show_count, show_percent, show_seconds

_FILE: Final = "plan.yaml"
_TIMELINE, _MEMORY, _SENT = "Timeline", "Memory", "Communication"
_WHY, _EDIT = "Why this plan", "Edit a field"


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
    name, place = open_tab((_TIMELINE, _MEMORY, _SENT, _WHY, _EDIT), "part")
    with place:
        if name == _WHY:
            draw_why(view, scenario, plan)
        elif name == _EDIT:
            draw_edit(view, scenario, plan)
        else:
            _step(name, found, scenario, view)


def _step(name: str, found: Depth, scenario: Scenario, view: View) -> None:
    """Draws one of the charts of the simulated step."""
    command = view.command("simulate", "--plan", _FILE, "--engine", "replay")
    step = found.step
    if name == _TIMELINE:
        st.caption("A row a pipeline stage. Drag to zoom in, double-click to zoom out.")
        figure = plan_figures.timeline_figure(step.trace, step.step_time_s)
        chart(figure, alt="timeline of a step", command=[*command, "--trace", "t.json.gz"])
    elif name == _MEMORY:
        capacity_bytes = scenario.cluster.node.gpu.hbm_bytes
        figure = plan_figures.memory_timeline_figure(step.memory, capacity_bytes, step.step_time_s)
        chart(figure, alt="memory through a step", command=command)
    elif found.comm_bytes:
        st.caption("What one rank of the busiest stage sends in a step.")
        figure = plan_figures.comm_figure(found.comm_bytes)
        chart(figure, alt="traffic by group", command=view.command("plan", "--json"))
    else:
        st.info("One rank sends nothing.")


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
    columns = st.columns(5)
    columns[0].metric("step time", show_seconds(metrics.step_time_s))
    low, high = show_seconds(interval.low), show_seconds(interval.high)
    columns[0].caption(f"{low} to {high} at 80 %")
    columns[1].metric("tokens/s a GPU", show_count(metrics.tokens_per_s_per_gpu))
    columns[1].caption(f"{show_count(metrics.tokens_per_s)} in all")
    columns[2].metric("MFU", f"{metrics.mfu:.1%}")
    columns[2].caption(f"provenance: {found.prediction.provenance}")
    columns[3].metric("peak memory", show_bytes(metrics.peak_memory_bytes))
    columns[3].caption(f"of {show_bytes(hbm_bytes)} a GPU")
    columns[4].metric("bubble", show_percent(found.step.bubble))
    columns[4].caption("of the step: waiting")


def _files(found: Depth, scenario: Scenario) -> None:
    """Draws the downloads, each written when it is asked for."""
    with st.container(horizontal=True):
        st.download_button(
            f"Download {_FILE}",
            lambda: dump_yaml(
                plan_file(scenario, found.plan), header="Downloaded from the dashboard."
            ),
            file_name=_FILE,
            mime="application/yaml",
            on_click="ignore",
        )
        st.download_button(
            "Download the timeline (opens in ui.perfetto.dev)",
            lambda: perfetto(found),
            file_name="predicted.trace.json.gz",
            mime="application/gzip",
            on_click="ignore",
        )
