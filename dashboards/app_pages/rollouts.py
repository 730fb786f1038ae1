"""Rollouts: one co-located RL round under a lambda, and the lambda that serves best."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from flopwright.dashboards import rollout_figures
from flopwright.dashboards.parts import chart, chosen, keep_in_url, show_problems
from flopwright.errors import InputError
from flopwright.simulator.rollouts.report import RoundReport
from flopwright.simulator.rollouts.rounds import simulate
from flopwright.simulator.rollouts.sweep import LambdaSweep, sweep_lambda
from flopwright.simulator.rollouts.text import assumption_lines
from flopwright.spec.load import catalog_names
from flopwright.spec.rollout import (
    ROLLOUT_CATALOG,
    RolloutScenario,
    load_rollout_scenario,
    with_stop_fraction,
)
from flopwright.units import show_bytes, show_count, show_seconds

_HASH = {RolloutScenario: RolloutScenario.content_hash}


_SIMULATED: Callable[[RolloutScenario], RoundReport] = st.cache_resource(
    show_spinner="simulating rounds", max_entries=64, hash_funcs=_HASH
)(simulate)
_SWEPT: Callable[[RolloutScenario], LambdaSweep] = st.cache_resource(
    show_spinner="simulating every lambda", max_entries=8, hash_funcs=_HASH
)(sweep_lambda)


def page() -> None:
    """Draws the page."""
    st.title("Rollouts")
    st.caption(
        "A round generates until a share lambda of the attempts in flight is complete; "
        "the rest is parked and resumed first in the next round, under newer weights."
    )
    try:
        name = chosen("Scenario", catalog_names(ROLLOUT_CATALOG), "rollout")
        scenario = load_rollout_scenario(name)
        fraction = _slider(scenario)
        keep_in_url(rollout=name, **{"lambda": f"{fraction:g}"})
        report = _SIMULATED(with_stop_fraction(scenario, fraction))
        whole = _SIMULATED(with_stop_fraction(scenario, 1.0))
    except InputError as error:
        show_problems(error, "This scenario cannot be simulated")
        return
    st.caption(scenario.description)
    _metrics(report, whole)
    command = ["flopwright", "rollouts", name, "--lambda", f"{fraction:g}"]
    left, right = st.columns(2)
    with left:
        st.subheader("Completions of the last round")
        figure = rollout_figures.completion_figure(
            report.completion_curve, fraction, whole.completion_curve
        )
        chart(figure, alt="attempts complete over time", command=command)
    with right:
        st.subheader("Time of a round by phase")
        figure = rollout_figures.phases_figure({f"lambda {fraction:g}": report, "lambda 1": whole})
        chart(figure, alt="time of a round by phase", command=command)
    _sweep(scenario, name)
    with st.expander("Assumptions"):
        st.markdown("\n".join(f"- {text}" for text in assumption_lines(report)))


def _slider(scenario: RolloutScenario) -> float:
    """Returns lambda, from a slider of the scenario's own; it starts at the URL's."""
    state = f"lambda {scenario.name}"
    if state not in st.session_state:
        st.session_state[state] = scenario.stop_fraction
        if st.query_params.get("rollout") == scenario.name:
            st.session_state[state] = _number(st.query_params.get("lambda"), scenario)
    return float(st.slider("lambda", 0.3, 1.0, step=0.01, key=state))


def _number(text: str | None, scenario: RolloutScenario) -> float:
    """Returns the URL's lambda where it is one of the slider's, else the scenario's."""
    try:
        value = float(text or "")
    except ValueError:
        return scenario.stop_fraction
    return value if 0.3 <= value <= 1.0 else scenario.stop_fraction


def _metrics(report: RoundReport, whole: RoundReport) -> None:
    """Shows the mean steady round beside the one that waits for every attempt."""
    here, there = report.steady, whole.steady
    shown = (
        ("attempts/s", f"{report.attempts_per_s:.3g}", f"{whole.attempts_per_s:.3g}"),
        ("tokens/s", show_count(here.tokens_per_s), show_count(there.tokens_per_s)),
        ("round", show_seconds(here.round_time_s), show_seconds(there.round_time_s)),
        ("idle slots", f"{here.gpu_idle_share:.1%}", f"{there.gpu_idle_share:.1%}"),
        ("tail", show_seconds(here.tail_s), show_seconds(there.tail_s)),
        ("versions behind", f"{report.mean_staleness:.2f}", f"{whole.mean_staleness:.2f}"),
        ("KV peak", show_bytes(report.kv_peak_bytes), show_bytes(whole.kv_peak_bytes)),
    )
    for column, (title, value, at_one) in zip(st.columns(len(shown)), shown, strict=True):
        column.metric(title, value)
        column.caption(f"{at_one} at lambda 1")
    st.caption(
        f"Versions behind: mean at completion; {report.off_policy_share:.1%} of the tokens come "
        f"from older weights. KV peak: fullest instance; {show_bytes(report.parked_bytes)} are "
        "parked over all. Tail: time in which at most a tenth of the attempts still run."
    )
    if not report.kv_fits:
        st.warning(
            "The KV cache of the fullest instance passes its capacity of "
            f"{show_bytes(report.kv_capacity_bytes or 0)}: real engines would preempt attempts, "
            "so these times are a lower bound."
        )


def _sweep(scenario: RolloutScenario, name: str) -> None:
    """Shows the sweep once it was asked for; it takes some seconds, so not before."""
    st.subheader("Which lambda is best")
    asked = st.query_params.get("sweep") == "1"
    if not asked and not st.button("Simulate every lambda", type="primary"):
        st.caption("Simulates a grid of lambdas on the same lengths; some seconds.")
        return
    keep_in_url(sweep="1")
    try:
        sweep = _SWEPT(scenario)
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
    chart(rollout_figures.sweep_figure(sweep), alt="attempts/s and staleness", command=command)
