"""The loop of the Rollouts page: layouts compared, throughput against staleness, what binds."""

from __future__ import annotations

from typing import Final

import streamlit as st

from flopwright.dashboards import rollout_figures as figures
from flopwright.dashboards.parts import chart, chosen, keep_in_url
from flopwright.dashboards.results import results
from flopwright.planner.rollouts.result import LoopResult, RankedLoop
from flopwright.planner.rollouts.search import search_loop
from flopwright.spec.load import catalog_names, dump_yaml
from flopwright.spec.loop import LoopScenario, is_loop, load_loop_scenario
from flopwright.spec.rollout import ROLLOUT_CATALOG
from flopwright.units import plural, show_count, show_seconds

_LIMIT_S: Final = 60.0


def draw_loop() -> None:
    """Draws the search for a loop.

    Raises:
        InputError: the scenario, or no choice of it can be made complete.
    """
    st.caption(
        "Which GPUs generate, on which instances, with how many attempts at once, when a round "
        "ends, how the update is split, and what lies where: planned together."
    )
    names = [n for n in catalog_names(ROLLOUT_CATALOG) if is_loop(n)]
    name = chosen("Scenario", names, "loop")
    keep_in_url(loop=name)
    loop = load_loop_scenario(name)
    st.caption(loop.rollout.description)
    limit_s = st.number_input("Seconds to search for, at most", 5.0, 3600.0, _LIMIT_S, step=5.0)
    kind = f"loop {limit_s:g}"
    result = results().get(kind, loop)
    if result is None:
        if not st.button("Plan the loop", type="primary"):
            st.info("Each loop that is tried is simulated over many rounds: it takes a while.")
            return
        result = _searched(loop, limit_s)
        results().put(kind, loop, result)
    assert isinstance(result, LoopResult)
    command = ["flopwright", "rollouts", name, "--search", "--time-limit", f"{limit_s:g}"]
    _drawn(result, [*command, "--out", "loop.yaml"])


def _searched(loop: LoopScenario, limit_s: float) -> LoopResult:
    """Searches under a progress bar; any other action on the page ends it."""
    bar = st.progress(0.0, "simulating loops")

    def advance(done: int, total: int) -> None:
        bar.progress(min(1.0, done / max(1, total)), f"{done:,} of {total:,} loops settled")

    found = search_loop(loop, time_limit_s=limit_s, progress=advance)
    bar.empty()
    return found


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
