"""Explore: does a scenario fit, how fast, how dear, and what binds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import streamlit as st

from flopwright.dashboards import figures, tables
from flopwright.dashboards.parts import (
    binding_text,
    chart,
    chosen,
    keep_in_url,
    show_problems,
    uploaded_scenario,
)
from flopwright.dashboards.planned import bound_by, searched
from flopwright.errors import InputError
from flopwright.planner.explain import Binding, legend, verdict_text
from flopwright.planner.result import RankedPlan, SearchResult
from flopwright.planner.whole_run import whole_run
from flopwright.spec.base import Spec
from flopwright.spec.load import SCENARIO_CATALOG, catalog_names, load_scenario
from flopwright.spec.scenario import Scenario
from flopwright.units import plural, show_count, show_seconds

_TOP = ("5", "10", "20")
_HASH: dict[type[Spec], Callable[..., str]] = {
    Scenario: Scenario.content_hash,
    SearchResult: SearchResult.content_hash,
}


class Choice(NamedTuple):
    """What the form asks for; `reference` is what the command line would be given."""

    scenario: Scenario
    reference: str
    top_k: int


_SEARCHED: Callable[..., SearchResult] = st.cache_resource(
    show_spinner="pricing every legal plan", max_entries=16, hash_funcs=_HASH
)(searched)
_BINDING: Callable[[SearchResult, Scenario], tuple[Binding, ...]] = st.cache_resource(
    show_spinner="asking what binds", max_entries=16, hash_funcs=_HASH
)(bound_by)


def page() -> None:
    """Draws the page."""
    st.title("Explore")
    st.caption("Every legal split of a training step, priced: which fit, and which is fastest.")
    try:
        choice = _form()
        result = _SEARCHED(choice.scenario, top_k=choice.top_k)
    except InputError as error:
        show_problems(error, "This scenario cannot be planned")
        return
    command = ["flopwright", "plan", choice.reference, "--top", str(choice.top_k)]
    _verdict(result, choice)
    if result.best is None:
        _nothing_fits(result, choice.scenario, command)
        return
    _plans(result, choice, command)


def _form() -> Choice:
    """Returns the choice of scenario; an upload goes before the shipped one."""
    with st.form("scenario"):
        left, middle, right = st.columns([3, 1, 3])
        with left:
            name = chosen("Scenario", catalog_names(SCENARIO_CATALOG), "scenario")
        with middle:
            top = chosen("Plans listed", _TOP, "top")
        with right:
            upload = st.file_uploader(
                "or your own scenario (YAML, at most 1 MB)", type=["yaml", "yml"]
            )
        st.form_submit_button("Plan", type="primary")
    if upload is None:
        keep_in_url(scenario=name, top=top)
        return Choice(load_scenario(name), name, int(top))
    return Choice(uploaded_scenario(upload.name, upload.getvalue()), upload.name, int(top))


def _verdict(result: SearchResult, choice: Choice) -> None:
    """Shows the verdict first, then what it costs and what binds."""
    show = {"fits": st.success, "tight": st.warning, "does_not_fit": st.error}[result.verdict]
    show(f"**{verdict_text(result, choice.scenario)}**")
    best = result.best
    if best is None:
        return
    metrics, whole = best.prediction.metrics, whole_run(choice.scenario, best.prediction)
    interval = best.prediction.step_time_interval
    columns = st.columns(5)
    columns[0].metric("step time", show_seconds(metrics.step_time_s))
    columns[0].caption(f"{show_seconds(interval.low)} to {show_seconds(interval.high)} at 80 %")
    columns[1].metric("tokens/s", show_count(metrics.tokens_per_s))
    columns[1].caption(f"{show_count(metrics.tokens_per_s_per_gpu)} a GPU")
    columns[2].metric("MFU", f"{metrics.mfu:.1%}")
    columns[2].caption(f"provenance: {best.prediction.provenance}")
    columns[3].metric("whole run", show_seconds(86400 * whole.days))
    columns[3].caption(f"{show_count(whole.gpu_hours)} GPU-hours")
    columns[4].metric("money", "-" if whole.usd is None else f"{show_count(whole.usd)} USD")
    columns[4].caption(plural(whole.steps, "step"))
    st.markdown(binding_text(_BINDING(result, choice.scenario)))


def _nothing_fits(result: SearchResult, scenario: Scenario, command: list[str]) -> None:
    """Shows the nearest plans with what each lacks and the smallest change that would help."""
    st.subheader("Nearest plans, and what they lack")
    st.dataframe(tables.infeasible(result), hide_index=True, width="stretch")
    figure = figures.pareto_figure(result, scenario.cluster.node.gpu.hbm_bytes)
    chart(figure, alt="trade-offs", command=command)


def _plans(result: SearchResult, choice: Choice, command: list[str]) -> None:
    """Shows the ranked plans, one of them in detail, and the trade-offs."""
    st.subheader("Best plans")
    st.dataframe(tables.ranked(result), hide_index=True, width="stretch")
    st.caption(legend(r.plan.label() for r in result.ranked))
    predictions = {f"{r.rank}. {r.plan.label()}": r.prediction for r in result.ranked}
    st.subheader("Where the step's time goes")
    chart(figures.step_time_figure(predictions), alt="step time by class", command=command)
    capacity_bytes = choice.scenario.cluster.node.gpu.hbm_bytes
    left, right = st.columns(2)
    with left:
        st.subheader("Memory by pipeline stage")
        figure = figures.memory_figure(_one_of(result).prediction.metrics, capacity_bytes)
        chart(figure, alt="memory by stage", command=command)
    with right:
        st.subheader("Time against memory")
        st.caption("Each point is a legal plan; hover for its split.")
        chart(figures.pareto_figure(result, capacity_bytes), alt="trade-offs", command=command)
    if result.infeasible:
        with st.expander(f"Plans that lack memory ({len(result.infeasible)}), and why"):
            st.dataframe(tables.infeasible(result), hide_index=True, width="stretch")
    with st.expander("Assumptions"):
        st.markdown("\n".join(f"- {a}" for a in result.ranked[0].prediction.assumptions))


def _one_of(result: SearchResult) -> RankedPlan:
    """Returns the plan to show in detail, kept in the URL by its label."""
    labels = {r.plan.label(): r for r in result.ranked}
    label = chosen("Plan", list(labels), "plan")
    keep_in_url(plan=label)
    return labels[label]
