"""Rollouts: one co-located RL round under a lambda, and the lambda that serves best."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from flopwright.dashboards import figures
from flopwright.dashboards.parts import chart, chosen, keep_in_url, show_problems
from flopwright.errors import InputError
from flopwright.simulator.rollouts.report import RoundReport
from flopwright.simulator.rollouts.rounds import simulate
from flopwright.simulator.rollouts.sweep import LambdaSweep, sweep_lambda
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
        figure = figures.completion_figure(
            report.completion_curve, fraction, whole.completion_curve
        )
        chart(figure, alt="attempts complete over time", command=command)
    with right:
        st.subheader("Time of a round by phase")
        figure = figures.phases_figure({f"lambda {fraction:g}": report, "lambda 1": whole})
        chart(figure, alt="time of a round by phase", command=command)
    _sweep(scenario, name)
    with st.expander("Assumptions"):
        st.markdown("\n".join(f"- {text}" for text in report.assumptions))


def _slider(scenario: RolloutScenario) -> float:
    """Returns lambda, from the slider; it starts at the URL's or the scenario's value."""
    try:
        start = float(st.query_params.get("lambda", scenario.stop_fraction))
    except ValueError:
        start = scenario.stop_fraction
    start = start if 0.3 <= start <= 1.0 else scenario.stop_fraction
    return float(st.slider("lambda", 0.3, 1.0, start, 0.01))


def _metrics(report: RoundReport, whole: RoundReport) -> None:
    """Shows the mean steady round beside the one that waits for every attempt."""
    here, there = report.steady, whole.steady
    columns = st.columns(6)
    columns[0].metric("attempts/s", f"{report.attempts_per_s:.3g}")
    columns[0].caption(f"{whole.attempts_per_s:.3g} at lambda 1")
    columns[1].metric("round", show_seconds(here.round_time_s))
    columns[1].caption(f"{show_seconds(there.round_time_s)} at lambda 1")
    columns[2].metric("idle slots", f"{here.gpu_idle_share:.1%}")
    columns[2].caption(f"{there.gpu_idle_share:.1%} at lambda 1")
    columns[3].metric("tail", show_seconds(here.tail_s))
    columns[3].caption(f"{show_seconds(there.tail_s)} at lambda 1")
    columns[4].metric("versions behind (mean)", f"{report.mean_staleness:.2f}")
    columns[4].caption(f"{report.off_policy_share:.1%} of tokens off-policy")
    columns[5].metric("KV peak an instance", show_bytes(report.kv_peak_bytes))
    columns[5].caption(
        f"{show_bytes(report.parked_bytes)} parked, {show_count(here.tokens_per_s)} tokens/s"
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
    chart(figures.sweep_figure(sweep), alt="attempts/s and staleness", command=command)
