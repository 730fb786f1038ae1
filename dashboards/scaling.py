"""Explore's other tabs: what each resource holds back, and how the scenario scales."""

from __future__ import annotations

from typing import Final

import pandas as pd
import streamlit as st

from flopwright.dashboards import figures
from flopwright.dashboards.parts import chart
from flopwright.dashboards.results import results
from flopwright.dashboards.view import View
from flopwright.planner.result import SearchResult
from flopwright.planner.sensitivity import sensitivities
from flopwright.planner.sweep import SweepRow, plan_point
from flopwright.simulator.accuracy.named_stacks import scenario_calibration
from flopwright.spec.load import dump_yaml
from flopwright.spec.scenario import Scenario
from flopwright.spec.sweep import sweep_points

_FACTORS: Final = (0.25, 0.5, 1, 2, 4)


def draw_sensitivities(result: SearchResult, scenario: Scenario, view: View) -> None:
    """Draws what each resource holds back of the best plan, and what 10 % more would give."""
    best = result.best
    assert best is not None
    found = sensitivities(scenario, best.plan, scenario_calibration(scenario))
    st.caption(
        "How much of the step would go if a resource had no limit, and what it gives to have "
        "10 % more of it: the best plan priced again."
    )
    figure = figures.sensitivity_figure(found)
    chart(figure, alt=f"{view.slot}sensitivities", command=view.command("explain"))


def scaled(scenario: Scenario) -> Scenario:
    """Returns the scenario with a sweep over nodes, from a quarter of its own to four times."""
    own = scenario.cluster.num_nodes
    nodes = sorted({max(1, round(own * f)) for f in _FACTORS})
    return scenario.model_copy(update={"sweep": {"cluster.num_nodes": tuple(nodes)}})


def draw_scaling(scenario: Scenario, view: View) -> None:
    """Draws throughput over cluster sizes; each size is planned anew, on request."""
    if scenario.cluster.network is None:
        st.info("This cluster has no network between nodes: it is one node.")
        return
    swept = scaled(scenario)
    rows = results().get("scaling", scenario)
    st.caption("The best plan for a quarter to four times the nodes, each planned in full.")
    if rows is None:
        points = sweep_points(swept)
        if not st.button(f"Plan {len(points)} cluster sizes", key=f"{view.slot}scale"):
            return
        bar = st.progress(0.0, "planning")
        done: list[SweepRow] = []
        for index, point in enumerate(points):
            bar.progress(index / len(points), f"{point.scenario.cluster.num_gpus:,} GPUs")
            done.append(plan_point(point))
        bar.empty()
        rows = tuple(done)
        results().put("scaling", scenario, rows)
    assert isinstance(rows, tuple)
    figure = figures.scaling_figure(rows)
    name = f"{scenario.name}_scaling.yaml"
    chart(figure, alt=f"{view.slot}scaling", command=["flopwright", "sweep", name])
    st.download_button(
        f"Download {name}", dump_yaml(swept), file_name=name, key=f"{view.slot}scaling file"
    )
    table = pd.DataFrame(
        {
            "GPUs": [r.gpus for r in rows],
            "step time (s)": [r.step_time_s for r in rows],
            "tokens/s a GPU": [r.tokens_per_s_per_gpu for r in rows],
            "days": [r.days for r in rows],
            "USD": [r.usd for r in rows],
            "plan": [r.plan or r.reason for r in rows],
        }
    )
    st.dataframe(table, hide_index=True, width="stretch")
