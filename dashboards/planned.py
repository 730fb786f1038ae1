"""Plans as `flopwright plan` finds them: under the scenario's software stack."""

from __future__ import annotations

from flopwright.planner.explain import Binding, binding_constraint
from flopwright.planner.result import SearchResult
from flopwright.planner.search import search
from flopwright.simulator.accuracy.named_stacks import scenario_calibration
from flopwright.spec.scenario import Scenario


def searched(scenario: Scenario, top_k: int) -> SearchResult:
    """Returns the best plans of a scenario."""
    return search(scenario, scenario_calibration(scenario), top_k)


def bound_by(result: SearchResult, scenario: Scenario) -> tuple[Binding, ...]:
    """Returns what limits the best plan, the strongest first."""
    return binding_constraint(result, scenario, scenario_calibration(scenario))
