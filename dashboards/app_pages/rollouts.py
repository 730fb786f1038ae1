"""Rollouts: one RL round under a lambda, the lambda that serves best, and the whole loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import streamlit as st

from flopwright.dashboards import rollout_figures as figures
from flopwright.dashboards.loop_view import draw_loop
from flopwright.dashboards.parts import chart, chosen, keep_in_url, show_problems
from flopwright.dashboards.rounds_view import draw_metrics, swept
from flopwright.errors import InputError
from flopwright.simulator.rollouts.report import RoundReport
from flopwright.simulator.rollouts.rounds import simulate
from flopwright.simulator.rollouts.text import assumption_lines
from flopwright.spec.loop import round_names
from flopwright.spec.rollout import RolloutScenario, load_rollout_scenario, with_stop_fraction

_HASH: Final = {RolloutScenario: RolloutScenario.content_hash}
_SIMULATED: Callable[[RolloutScenario], RoundReport] = st.cache_resource(
    show_spinner="simulating rounds", max_entries=64, hash_funcs=_HASH
)(simulate)
_ROUND, _LOOP = "One round", "Plan the loop"


def page() -> None:
    """Draws the page."""
    st.title("Rollouts")
    views = (_ROUND, _LOOP)
    state = "view of rollouts"
    if state not in st.session_state:
        st.session_state[state] = _LOOP if st.query_params.get("view") == "loop" else _ROUND
    view = st.segmented_control("View", views, key=state, label_visibility="collapsed")
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
    name = chosen("Scenario", round_names(), "rollout")
    scenario = load_rollout_scenario(name)
    fraction = _slider(scenario)
    keep_in_url(rollout=name, **{"lambda": f"{fraction:g}"})
    report = _SIMULATED(with_stop_fraction(scenario, fraction))
    whole = _SIMULATED(with_stop_fraction(scenario, 1.0))
    st.caption(scenario.description)
    draw_metrics(report, whole)
    command = ["flopwright", "rollouts", name, "--lambda", f"{fraction:g}"]
    left, right = st.columns(2)
    with left:
        st.subheader("Completions of the last round")
        figure = figures.completion_figure(
            report.completion_curve, fraction, whole.completion_curve
        )
        chart(figure, alt="attempts complete over time", command=command)
        st.subheader("How long completions are")
        figure = figures.lengths_figure(scenario.lengths)
        chart(figure, alt="distribution of lengths", command=command)
    with right:
        st.subheader("Time of a round by phase")
        figure = figures.phases_figure({f"lambda {fraction:g}": report, "lambda 1": whole})
        chart(figure, alt="time of a round by phase", command=command)
        st.subheader("Policy versions behind when trained on")
        figure = figures.staleness_figure(report.trained_staleness)
        chart(figure, alt="staleness", command=command)
    _sweep(scenario, name)
    with st.expander("Assumptions"):
        st.markdown("\n".join(f"- {text}" for text in assumption_lines(report)))


def _slider(scenario: RolloutScenario) -> float:
    """Returns lambda, from a slider of the scenario's own; it starts at the URL's."""
    state = f"lambda {scenario.name}"
    if state not in st.session_state:
        st.session_state[state] = scenario.fraction
        if st.query_params.get("rollout") == scenario.name:
            st.session_state[state] = _number(st.query_params.get("lambda"), scenario)
    return float(st.slider("lambda", 0.3, 1.0, step=0.01, key=state))


def _number(text: str | None, scenario: RolloutScenario) -> float:
    """Returns the URL's lambda where it is one of the slider's, else the scenario's."""
    try:
        value = float(text or "")
    except ValueError:
        return scenario.fraction
    return value if 0.3 <= value <= 1.0 else scenario.fraction


def _sweep(scenario: RolloutScenario, name: str) -> None:
    """Shows the sweep once it was asked for; it takes some seconds, so not before."""
    st.subheader("Which lambda is best")
    asked = st.query_params.get("sweep") == "1"
    if not asked and not st.button("Simulate every lambda", type="primary"):
        st.caption("Simulates a grid of lambdas on the same lengths; some seconds.")
        return
    keep_in_url(sweep="1")
    try:
        sweep = swept(scenario)
    except InputError as error:
        show_problems(error, "No lambda serves the goals")
        return
    best, calm = sweep.best_point, sweep.calmest_point
    st.success(
        f"**Best lambda {best.stop_fraction:g}**: {best.attempts_per_s:.3g} attempts/s at "
        f"{best.mean_staleness:.2f} versions behind. Largest within 2 % of it: "
        f"{calm.stop_fraction:g}. What binds is {sweep.binding}."
    )
    command = ["flopwright", "rollouts", name, "--sweep"]
    chart(figures.sweep_figure(sweep), alt="what lambda trades", command=command)
