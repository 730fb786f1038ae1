"""Explore's other tabs: what each resource holds back, and how the scenario scales."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd
import streamlit as st

from flopwright.dashboards import figures
from flopwright.dashboards.parts import chart
from flopwright.dashboards.results import held_back
from flopwright.dashboards.tables import four_digits
from flopwright.dashboards.view import View
from flopwright.dashboards.working import work
from flopwright.planner.result import SearchResult
from flopwright.planner.sweep import SweepRow
from flopwright.spec.load import dump_yaml
from flopwright.spec.scenario import Scenario
from flopwright.spec.sweep import sweep_points

_FACTORS: Final = (0.25, 0.5, 1, 2, 4)


def draw_sensitivities(result: SearchResult, view: View) -> None:
    """Draws what each resource holds back of the best plan, and what 10 % more would give."""
    st.caption(
        "How much of the step would go if a resource had no limit, and what it gives to have "
        "10 % more of it: the best plan priced again."
    )
    figure = figures.sensitivity_figure(held_back(result, view.scenario()))
    chart(figure, alt=f"{view.slot}sensitivities", command=view.command("explain"))


def scaled(scenario: Scenario) -> Scenario:
    """Returns the scenario with a sweep over nodes, from a quarter of its own to four times."""
    own = scenario.cluster.num_nodes
    nodes = sorted({max(1, round(own * f)) for f in _FACTORS})
    return scenario.model_copy(update={"sweep": {"cluster.num_nodes": tuple(nodes)}})


def draw_scaling(view: View) -> None:
    """Draws throughput over cluster sizes; each size is planned anew, on request."""
    scenario = view.scenario()
    if scenario.cluster.network is None:
        st.info("This cluster has no network between nodes: it is one node.")
        return
    swept = scaled(scenario)
    st.caption("The best plan for a quarter to four times the nodes, each planned in full.")
    rows = work(
        "scaling",
        swept,
        _rows,
        start=f"Plan {len(sweep_points(swept))} cluster sizes",
        place=view.slot,
    )
    if rows is None:
        return
    name, gpus = f"{scenario.name}_scaling.yaml", scenario.cluster.node.gpus
    command = ["flopwright", "sweep", name]
    chart(figures.scaling_figure(rows), alt=f"{view.slot}scaling", command=command)
    st.download_button(
        f"Download {name}",
        lambda: dump_yaml(swept),
        file_name=name,
        key=f"{view.slot}scaling file",
        on_click="ignore",
    )
    st.dataframe(
        pd.DataFrame(
            {
                "GPUs": [gpus * r.values["cluster.num_nodes"] for r in rows],
                "step time (s)": [four_digits(r.step_time_s) for r in rows],
                "tokens/s a GPU": [four_digits(r.tokens_per_s_per_gpu) for r in rows],
                "whole run (days)": [four_digits(r.days) for r in rows],
                "cost (USD)": [four_digits(r.usd) for r in rows],
                "plan": [r.plan or r.reason for r in rows],
            }
        ),
        hide_index=True,
        width="stretch",
    )


def _rows(data: Any) -> tuple[SweepRow, ...]:
    return tuple(SweepRow.model_validate(row) for row in data)
