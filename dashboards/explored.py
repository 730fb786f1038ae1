"""What Explore shows of a search: verdict first, then speed and cost, then the plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import streamlit as st

from flopwright.dashboards import figures, tables
from flopwright.dashboards.parts import binding_text, chart, chosen, keep_in_url, opened
from flopwright.dashboards.results import bound_by
from flopwright.dashboards.view import View
from flopwright.planner.explain import legend, verdict_text
from flopwright.planner.plan_text import plan_words
from flopwright.planner.result import RankedPlan, SearchResult
from flopwright.planner.whole_run import whole_run
from flopwright.units import plural, show_count, show_seconds

_AGAINST: Final = ("memory", "cost")


def draw_verdict(result: SearchResult, view: View, *, wide: bool) -> Callable[[], None]:
    """Draws the verdict and what the best plan costs.

    Returns:
        What draws the line under it: what binds takes longest, so the charts come first.
    """
    scenario = view.scenario()
    show = {"fits": st.success, "tight": st.warning, "does_not_fit": st.error}[result.verdict]
    show(f"**{verdict_text(result, scenario)}**")
    best = result.best
    if best is None:
        return lambda: None
    metrics, whole = best.prediction.metrics, whole_run(scenario, best.prediction)
    interval = best.prediction.step_time_interval
    columns = st.columns(5 if wide else 2)

    def put(number: int, title: str, value: str, caption: str) -> None:
        column = columns[number % len(columns)]
        column.metric(title, value)
        column.caption(caption)

    low, high = show_seconds(interval.low), show_seconds(interval.high)
    put(0, "step time", show_seconds(metrics.step_time_s), f"{low} to {high} at 80 %")
    a_gpu = f"{show_count(metrics.tokens_per_s_per_gpu)} a GPU"
    put(1, "tokens/s", show_count(metrics.tokens_per_s), a_gpu)
    put(2, "MFU", f"{metrics.mfu:.1%}", f"provenance: {best.prediction.provenance}")
    hours = f"{show_count(whole.gpu_hours)} GPU-hours"
    put(3, "whole run", show_seconds(86400 * whole.days), hours)
    money = "-" if whole.usd is None else show_count(whole.usd)
    steps = plural(whole.steps, "step")
    put(4, "money (USD)", money, steps if whole.usd is not None else f"{steps}; no price is known")
    place = st.empty()
    place.caption("What binds: being priced")
    if _is_first_look(result):
        st.caption(
            f"A first look at {plural(result.candidates, 'plan')}: the best by its bound, its "
            "step exact."
        )

    def bind() -> None:
        place.markdown(binding_text(bound_by(result, scenario)))

    return bind


def _is_first_look(result: SearchResult) -> bool:
    """Returns whether the search of every plan is still to come (planner.quick)."""
    return not result.proved and result.replayed == len(result.ranked) == 1


def draw_nothing_fits(result: SearchResult, view: View) -> None:
    """Draws the nearest plans with what each lacks and the smallest change that would help."""
    st.subheader("Nearest plans, and what they lack")
    st.dataframe(tables.infeasible(result), hide_index=True, width="stretch")
    figure = figures.pareto_figure(result, view.scenario())
    chart(figure, alt=f"{view.slot}trade-offs", command=view.command("plan", "--top", "10"))


def draw_plans(result: SearchResult, view: View, *, wide: bool) -> None:
    """Draws the ranked plans, one of them in detail, and the trade-offs."""
    scenario, slot = view.scenario(), view.slot
    command = view.command("plan", "--top", str(max(5, len(result.ranked))))
    st.subheader("Best plans")
    rows = tables.ranked(result)
    if _is_first_look(result):
        # One row needs no grid, whose scripts take longer than all else but the charts'.
        st.markdown(tables.as_markdown(rows))
    else:
        st.dataframe(rows, hide_index=True, width="stretch")
    st.caption(legend(r.plan.label() for r in result.ranked))
    shown = result.ranked[: 8 if wide else 4]
    st.subheader("Where the step's time goes")
    predictions = {f"{r.rank}. {r.plan.label()}": r.prediction for r in shown}
    chart(figures.step_time_figure(predictions), alt=f"{slot}step time by class", command=command)
    left, right = st.columns(2) if wide else (st.container(), st.container())
    with right:
        picked = _trade_offs(result, view, command)
    with left:
        st.subheader("Memory by pipeline stage")
        plan = _one_of(result, slot, picked)
        capacity_bytes = scenario.cluster.node.gpu.hbm_bytes
        figure = figures.memory_figure(plan.prediction.metrics, capacity_bytes)
        chart(figure, alt=f"{slot}memory by stage", command=command)
        if st.button("Open this plan in depth", key=f"{slot}open"):
            _open(view, plan)
    if result.infeasible:
        label = f"Plans that lack memory ({len(result.infeasible)}), and why"
        with opened(label, f"{slot}lacking") as wanted:
            if wanted:
                st.dataframe(tables.infeasible(result), hide_index=True, width="stretch")
    with opened("Assumptions", f"{slot}assumed") as wanted:
        if wanted:
            st.markdown("\n".join(f"- {a}" for a in result.ranked[0].prediction.assumptions))


def _trade_offs(result: SearchResult, view: View, command: list[str]) -> str | None:
    """Draws time against memory or cost; returns the label of the plan clicked on."""
    st.subheader("Trade-offs")
    against = st.segmented_control(
        "Time against",
        _AGAINST,
        default=_AGAINST[0],
        required=True,
        key=f"{view.slot}against",
        bind="query-params",
        help="a point is a plan: hover for its split; a click on a listed one selects it",
    )
    return chart(
        figures.pareto_figure(result, view.scenario(), str(against)),
        alt=f"{view.slot}trade-offs",
        command=command,
        selects=True,
    )


def _open(view: View, plan: RankedPlan) -> None:
    """Goes to the Plan page with this plan."""
    from flopwright.dashboards.app_pages.plan import page

    view.remember()
    where = {"scenario": view.name, "set": list(view.words), "plan": plan_words(plan.plan)}
    st.switch_page(st.Page(page, url_path="plan"), query_params=where)


def _one_of(result: SearchResult, slot: str, picked: str | None) -> RankedPlan:
    """Returns the plan to show in detail: the one just clicked, else the one chosen."""
    if _is_first_look(result):
        # The address may name a plan that only the search of every plan will find: it stays.
        (first,) = result.ranked
        st.selectbox("Plan", [first.plan.label()], key=f"{slot}plan of the first look")
        return first
    labels = {r.plan.label(): r for r in result.ranked}
    state, last = f"choice {slot}plan", f"{slot}last click"
    if picked in labels and st.session_state.get(last) != picked:
        st.session_state[state] = picked
    st.session_state[last] = picked
    label = chosen("Plan", list(labels), f"{slot}plan")
    keep_in_url(**{f"{slot}plan": label})
    return labels[label]
