"""The loop of the Rollouts page: layouts compared, throughput against staleness, what binds."""

from __future__ import annotations

from typing import Any, Final

import streamlit as st

from flopwright.dashboards import rollout_figures as figures
from flopwright.dashboards.parts import chart, number
from flopwright.dashboards.rollout_choice import chosen_loop
from flopwright.dashboards.working import work
from flopwright.planner.rollouts.result import LoopResult, RankedLoop
from flopwright.spec.load import dump_yaml
from flopwright.units import plural, show_count, show_seconds

_LIMIT_S: Final = 60.0
# Further options of the search: the tests search less.
SEARCH: Final[dict[str, Any]] = {}


def draw_loop() -> None:
    """Draws the search for a loop.

    Raises:
        InputError: the scenario, or no choice of it can be made complete.
    """
    st.caption(
        "Which GPUs generate, on which instances, with how many attempts at once, when a round "
        "ends, how the update is split, and what lies where: planned together."
    )
    found = chosen_loop()
    st.caption(found.scenario.rollout.description)
    limit_s = number(
        "Seconds to search for, at most",
        "seconds",
        5.0,
        3600.0,
        _LIMIT_S,
        about="each loop that is tried is simulated over many rounds: it takes a while",
    )
    result = work(
        "loop",
        found.scenario,
        LoopResult.model_validate,
        start="Plan the loop",
        again="Plan the loop",
        more=f"{limit_s:g}",
        failed="This loop cannot be planned",
        time_limit_s=limit_s,
        **SEARCH,
    )
    if result is None:
        return
    command = ["flopwright", "rollouts", found.name, "--search", "--time-limit", f"{limit_s:g}"]
    _drawn(result, [*command, "--out", "loop.yaml"])


def _drawn(result: LoopResult, command: list[str]) -> None:
    best = result.best
    if best is None:
        st.error("**No loop fits and keeps the goals.**")
        st.dataframe(_infeasible(result), hide_index=True, width="stretch")
        return
    st.success(f"**{best.words}**: {best.outcome.attempts_per_s:.3g} attempts/s")
    if not result.complete:
        st.warning(f"The time did not suffice for {plural(result.left, 'loop')} of the grid.")
    columns = st.columns(4)
    metrics = best.outcome.iteration
    columns[0].metric("iteration", show_seconds(metrics.round_time_s))
    columns[1].metric("tokens/s", show_count(metrics.tokens_per_s))
    columns[2].metric("versions behind", f"{best.outcome.mean_staleness:.2f}")
    usd = best.outcome.usd
    columns[3].metric("an iteration costs", "-" if usd is None else f"{usd:,.0f} USD")
    columns[3].caption(f"{best.outcome.gpu_hours:.3g} GPU-hours on {best.outcome.gpus} GPUs")
    left, right = st.columns(2)
    with left:
        st.subheader("Throughput against staleness")
        chart(figures.front_figure(result), alt="throughput against staleness", command=command)
    with right:
        st.subheader("What binds")
        chart(figures.binds_figure(result.binds), alt="what binds", command=command)
    st.subheader("Time by phase")
    chart(figures.loops_figure(result), alt="time by phase of each loop", command=command)
    st.dataframe([_row(r) for r in result.ranked], hide_index=True, width="stretch")
    st.download_button("Download loop.yaml", dump_yaml(best.plan), file_name="loop.yaml")
    if result.infeasible:
        with st.expander(f"Loops that do not fit or break a goal ({len(result.infeasible)})"):
            st.dataframe(_infeasible(result), hide_index=True, width="stretch")
    with st.expander("Assumptions"):
        st.markdown("\n".join(f"- {text}" for text in result.assumptions))


def _row(ranked: RankedLoop) -> dict[str, object]:
    out = ranked.outcome
    return {
        "loop": ranked.words,
        "layout": ranked.plan.layout.replace("_", "-"),
        "attempts/s": float(f"{out.attempts_per_s:.4g}"),
        "versions behind": round(out.mean_staleness, 2),
        "iteration (s)": float(f"{out.iteration.round_time_s:.4g}"),
        "USD an iteration": None if out.usd is None else round(out.usd),
    }


def _infeasible(result: LoopResult) -> list[dict[str, object]]:
    return [
        {
            "loop": i.words,
            "at most (attempts/s)": float(f"{i.most_attempts_per_s:.4g}"),
            "rule": "; ".join(v.rule for v in i.violations),
            "nearest fix": "; ".join(v.nearest_fix for v in i.violations if v.nearest_fix),
        }
        for i in result.infeasible
    ]
