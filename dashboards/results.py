"""Searches that were made, kept for all sessions: keyed by the scenario's content."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import streamlit as st

from flopwright.planner.explain import Binding, binding_constraint
from flopwright.planner.quick import quick_look
from flopwright.planner.result import SearchResult
from flopwright.planner.search import Progress, search
from flopwright.simulator.accuracy.named_stacks import scenario_calibration
from flopwright.spec.base import Spec
from flopwright.spec.scenario import Scenario

LISTED: Final = 10
_KEPT: Final = 64


class Results:
    """The last searches by (what was asked, scenario); safe between sessions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], object] = OrderedDict()

    def get(self, kind: str, scenario: Spec) -> object | None:
        """Returns what was kept, None where nothing was."""
        key = (kind, scenario.content_hash())
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, kind: str, scenario: Spec, value: object) -> None:
        """Keeps a result; the one not looked at for longest makes room."""
        with self._lock:
            self._kept[kind, scenario.content_hash()] = value
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)


def results() -> Results:
    """Returns the one store of results of this server."""
    return _KEEPER()


_KEEPER: Callable[[], Results] = st.cache_resource(show_spinner=False)(Results)


def found(scenario: Scenario) -> SearchResult | None:
    """Returns the whole search where it was made, else None."""
    kept = results().get("search", scenario)
    assert kept is None or isinstance(kept, SearchResult)
    return kept


def whole_search(scenario: Scenario, progress: Progress | None = None) -> SearchResult:
    """Returns the best plans of a scenario, as `flopwright plan` finds them."""
    kept = found(scenario)
    if kept is None:
        kept = search(scenario, scenario_calibration, LISTED, progress=progress, refine=True)
        results().put("search", scenario, kept)
    return kept


def first_look(scenario: Scenario) -> SearchResult | None:
    """Returns planner.quick's answer; None where only the whole search can say more."""
    kept = results().get("quick", scenario)
    if kept is None:
        kept = quick_look(scenario, scenario_calibration(scenario)) or "nothing"
        results().put("quick", scenario, kept)
    return kept if isinstance(kept, SearchResult) else None


def bound_by(result: SearchResult, scenario: Scenario) -> tuple[Binding, ...]:
    """Returns what limits the best plan, the strongest first."""
    kind = f"binding {result.candidates} {result.best and result.best.plan.label()}"
    kept = results().get(kind, scenario)
    if kept is None:
        kept = binding_constraint(result, scenario, scenario_calibration(scenario))
        results().put(kind, scenario, kept)
    assert isinstance(kept, tuple)
    return kept
