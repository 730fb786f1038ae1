"""What was worked out, kept for all sessions: keyed by the scenario's content."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import cache
from typing import Any, Final

from flopwright.dashboards.working import answered, work
from flopwright.planner.explain import Binding, binding_constraint
from flopwright.planner.quick import quick_look
from flopwright.planner.result import SearchResult
from flopwright.planner.sensitivity import Sensitivity, sensitivities
from flopwright.simulator.accuracy.named_stacks import scenario_calibration
from flopwright.spec.base import Spec
from flopwright.spec.scenario import Scenario

_KEPT: Final = 64
_TASK: Final = "search"


class Results:
    """The last results by (what was asked, scenario); safe between sessions."""

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


@cache
def results() -> Results:
    """Returns the one store of results of this server."""
    return Results()


def found(scenario: Scenario) -> SearchResult | None:
    """Returns the whole search where it was made, else None."""
    kept = answered(_TASK, scenario)
    assert kept is None or isinstance(kept, SearchResult)
    return kept


def whole_search(scenario: Scenario, slot: str) -> SearchResult | None:
    """Returns the best plans, as `flopwright plan` finds them; None while it draws progress."""
    return work(
        _TASK,
        scenario,
        read_search,
        place=slot,
        again="Search every plan",
        failed="This scenario cannot be planned",
    )


def read_search(data: Any) -> SearchResult:
    """Returns the worker's answer as a record."""
    return SearchResult.model_validate(data)


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


def held_back(result: SearchResult, scenario: Scenario) -> tuple[Sensitivity, ...]:
    """Returns what each resource holds back of the best plan."""
    best = result.best
    assert best is not None
    kind = f"held back {best.plan.label()}"
    kept = results().get(kind, scenario)
    if kept is None:
        kept = sensitivities(scenario, best.plan, scenario_calibration(scenario))
        results().put(kind, scenario, kept)
    assert isinstance(kept, tuple)
    return kept
