"""What the first page shows, worked out before anybody asks: so that it stands at once."""

from __future__ import annotations

from flopwright.dashboards import figures, tables
from flopwright.dashboards.results import bound_by, first_look
from flopwright.dashboards.scenario_form import FIRST
from flopwright.dashboards.view import View
from flopwright.spec.load import CLUSTER_CATALOG, MODEL_CATALOG, catalog_names, load_cluster


def first_page() -> None:
    """Answers what Explore asks of its first scenario, and draws its charts to nowhere."""
    view = View(FIRST)
    scenario = view.scenario()
    result = first_look(scenario)
    if result is None or result.best is None:
        return
    bound_by(result, scenario)
    tables.ranked(result)
    best = result.best.prediction
    figures.step_time_figure({"": best}).to_json()
    figures.memory_figure(best.metrics, scenario.cluster.node.gpu.hbm_bytes).to_json()
    figures.pareto_figure(result, scenario).to_json()
    catalog_names(MODEL_CATALOG)
    load_cluster(catalog_names(CLUSTER_CATALOG)[0])
