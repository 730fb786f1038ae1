"""What the first page shows, worked out before anybody asks: so that it stands at once."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Final

from flopwright.dashboards import figures, tables
from flopwright.dashboards.results import bound_by, first_look
from flopwright.dashboards.scenario_form import FIRST
from flopwright.dashboards.view import View
from flopwright.errors import InputError
from flopwright.simulator.calibration.files import default_calibration
from flopwright.spec.load import CLUSTER_CATALOG, catalog_names, load_cluster

_FIRST_PAGE_S: Final = 8.0
_PAUSE_S: Final = 0.3


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


def rest_later() -> None:
    """Reads what other clusters need, a piece at a time, once the first page has been drawn."""
    threading.Thread(target=_rest, daemon=True).start()


def _rest() -> None:
    time.sleep(_FIRST_PAGE_S)
    for name in catalog_names(CLUSTER_CATALOG):
        with contextlib.suppress(InputError):  # said where the cluster is chosen
            default_calibration(load_cluster(name).node.gpu)
        time.sleep(_PAUSE_S)
