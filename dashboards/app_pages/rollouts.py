"""Rollouts: one RL round under a lambda, the lambda that serves best, and the whole loop."""

from __future__ import annotations

from typing import Final

import streamlit as st

from flopwright.dashboards import rollout_figures as figures
from flopwright.dashboards.loop_view import draw_loop
from flopwright.dashboards.parts import chart, keep_in_url, show_problems
from flopwright.dashboards.rollout_choice import Chosen, chosen_round
from flopwright.dashboards.rounds_view import draw_metrics, simulated, swept
from flopwright.errors import InputError
from flopwright.simulator.rollouts.report import RoundReport
from flopwright.simulator.rollouts.text import assumption_lines
from flopwright.spec.rollout import RolloutScenario, with_stop_fraction

_ROUND, _LOOP = "One round", "Plan the loop"
_LEAST: Final = 0.3


def page() -> None:
    """Draws the page."""
    st.title("Rollouts")
    views = (_ROUND, _LOOP)
    view = st.segmented_control(
        "View",
        views,
        default=_LOOP if st.query_params.get("view") == "loop" else _ROUND,
        key="view of rollouts",
        required=True,
        label_visibility="collapsed",
    )
    keep_in_url(view="loop" if view == _LOOP else "round")
    try:
        if view == _LOOP:
            draw_loop()
        else:
            _round()
    except InputError as error:
        show_problems(error, "This scenario cannot be simulated")


def _round() -> None:
    """Draws one round."""
    st.caption(
        "A round generates until a share lambda of the attempts in flight is complete; "
        "the rest is parked and resumed first in the next round, under newer weights."
    )
    found = chosen_round()
    scenario = found.scenario
    if scenario.description:
        st.caption(scenario.description)
    fraction = _slider(scenario)
    keep_in_url(**{"lambda": f"{fraction:g}"})
    report = simulated(with_stop_fraction(scenario, fraction), "this lambda")
    whole = simulated(with_stop_fraction(scenario, 1.0), "lambda 1")
    if report is not None and whole is not None:
        _drawn(found, fraction, report, whole)


def _drawn(
    found: Chosen[RolloutScenario], fraction: float, report: RoundReport, whole: RoundReport
) -> None:
    draw_metrics(report, whole)
    command = ["flopwright", "rollouts", found.name, "--lambda", f"{fraction:g}"]
    left, right = st.columns(2)
    with left:
        st.subheader("Completions of the last round")
        figure = figures.completion_figure(
            report.completion_curve, fraction, whole.completion_curve
        )
        chart(figure, alt="attempts complete over time", command=command)
        st.subheader("How long completions are")
        figure = figures.lengths_figure(found.scenario.lengths)
        chart(figure, alt="distribution of lengths", command=command)
    with right:
        st.subheader("Time of a round by phase")
        figure = figures.phases_figure({f"lambda {fraction:g}": report, "lambda 1": whole})
        chart(figure, alt="time of a round by phase", command=command)
        st.subheader("Policy versions behind when trained on")
        figure = figures.staleness_figure(report.trained_staleness)
        chart(figure, alt="staleness", command=command)
    _sweep(found)
    with st.expander("Assumptions"):
        st.markdown("\n".join(f"- {text}" for text in assumption_lines(report)))


def _slider(scenario: RolloutScenario) -> float:
    """Returns lambda, from a slider of the scenario's own; it starts at the URL's."""
    start = min(1.0, max(_LEAST, scenario.fraction))
    if st.query_params.get("rollout") == scenario.name:
        start = _number(st.query_params.get("lambda"), start)
    return float(
        st.slider(
            "lambda: share of the attempts in flight that ends a round",
            _LEAST,
            1.0,
            start,
            step=0.01,
            key=f"lambda {scenario.name}",
        )
    )


def _number(text: str | None, own: float) -> float:
    """Returns the URL's lambda where it is one of the slider's, else the scenario's."""
    try:
        value = float(text or "")
    except ValueError:
        return own
    return value if _LEAST <= value <= 1.0 else own


def _sweep(found: Chosen[RolloutScenario]) -> None:
    """Shows the sweep once it was asked for; it takes some seconds, so not before."""
    st.subheader("Which lambda is best")
    st.caption("Throughput, idle share, staleness and KV use over lambda, on the same lengths.")
    sweep = swept(found.scenario, asked=st.query_params.get("sweep") == "1")
    if sweep is None:
        return
    keep_in_url(sweep="1")
    best, calm = sweep.best_point, sweep.calmest_point
    st.success(
        f"**Best lambda {best.stop_fraction:g}**: {best.attempts_per_s:.3g} attempts/s at "
        f"{best.mean_staleness:.2f} versions behind. Largest within 2 % of it: "
        f"{calm.stop_fraction:g}. What binds is {sweep.binding}."
    )
    command = ["flopwright", "rollouts", found.name, "--sweep"]
    chart(figures.sweep_figure(sweep), alt="what lambda trades", command=command)
