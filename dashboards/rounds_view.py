"""What the Rollouts page shows of one round: its numbers, and the sweep over lambda."""

from __future__ import annotations

from typing import Final

import streamlit as st

from flopwright.dashboards.results import results
from flopwright.dashboards.working import work
from flopwright.simulator.rollouts.report import RoundReport
from flopwright.simulator.rollouts.rounds import simulate
from flopwright.simulator.rollouts.sweep import LambdaSweep
from flopwright.spec.rollout import RolloutScenario
from flopwright.units import show_bytes, show_count, show_seconds

# Attempts times rounds that are simulated within about a second: no process of its own.
_AT_ONCE: Final = 200_000


def draw_metrics(report: RoundReport, whole: RoundReport) -> None:
    """Draws the mean steady round beside the one that waits for every attempt."""
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
    if report.recomputed_tokens:
        st.caption(
            f"{show_count(report.recomputed_tokens)} tokens of context are prefilled again a "
            "round, because their cache was lost."
        )
    if not report.kv_fits:
        st.warning(
            "The KV cache of the fullest instance passes its capacity of "
            f"{show_bytes(report.kv_capacity_bytes or 0)}: real engines would preempt attempts, "
            "so these times are a lower bound."
        )


def simulated(scenario: RolloutScenario, place: str) -> RoundReport | None:
    """Returns the rounds; None while a simulation that takes long is drawn as such."""
    if scenario.num_attempts * scenario.rounds <= _AT_ONCE:
        kept = results().get("rounds", scenario)
        if kept is None:
            with st.spinner("simulating rounds"):
                kept = simulate(scenario)
            results().put("rounds", scenario, kept)
        assert isinstance(kept, RoundReport)
        return kept
    return work(
        "rounds",
        scenario,
        RoundReport.model_validate,
        place=place,
        again="Simulate the rounds",
        failed="These rounds cannot be simulated",
    )


def swept(scenario: RolloutScenario, *, asked: bool) -> LambdaSweep | None:
    """Returns the sweep over lambda; None before it was asked for and while it is made.

    Args:
        asked: whether the address asks for it.
    """
    return work(
        "lambda",
        scenario,
        LambdaSweep.model_validate,
        start="" if asked else "Simulate every lambda",
        again="Simulate every lambda",
        failed="No lambda serves the goals",
    )
