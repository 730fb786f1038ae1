"""What an RL rollout workload is: prompts, completion lengths, decode cost, phases, goals.

A round generates until a fraction lambda of the attempts in flight has finished; the rest
is parked and resumed first in the next round, under newer weights. The records stand in
`flopwright.spec.rollouts`; this is where they are loaded, and imported from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from flopwright.errors import InputError, Violation
from flopwright.spec.load import SCENARIO_CATALOG, _open
from flopwright.spec.rollouts.agent import Agent, Reward, Sandbox, TimeLaw
from flopwright.spec.rollouts.engine import (
    EngineModel,
    HostPool,
    PrefillTable,
    Speculation,
    StepTable,
)
from flopwright.spec.rollouts.lengths import (
    MAX_ATTEMPTS,
    MAX_PHASE_S,
    DeterministicLengths,
    Drift,
    EffortBudget,
    EmpiricalLengths,
    ExponentialLengths,
    LengthSpec,
    LognormalLengths,
    ParetoLengths,
    VerbosityLimit,
    longest,
)
from flopwright.spec.rollouts.policy import (
    KvCache,
    Schedule,
    Staleness,
    Stop,
    Throttle,
)
from flopwright.spec.rollouts.scenario import (
    MAX_ROUNDS,
    MIN_STOP_FRACTION,
    DecodeStep,
    RolloutGoals,
    RolloutScenario,
    Switch,
    Update,
    WeightSync,
)
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import parse_yaml

__all__ = [
    "MAX_ATTEMPTS",
    "MAX_PHASE_S",
    "MAX_ROUNDS",
    "MIN_STOP_FRACTION",
    "ROLLOUT_CATALOG",
    "Agent",
    "DecodeStep",
    "DeterministicLengths",
    "Drift",
    "EffortBudget",
    "EmpiricalLengths",
    "EngineModel",
    "ExponentialLengths",
    "HostPool",
    "KvCache",
    "LengthSpec",
    "LognormalLengths",
    "ParetoLengths",
    "PrefillTable",
    "Reward",
    "RolloutGoals",
    "RolloutScenario",
    "Sandbox",
    "Schedule",
    "Speculation",
    "Staleness",
    "StepTable",
    "Stop",
    "Switch",
    "Throttle",
    "TimeLaw",
    "Update",
    "VerbosityLimit",
    "WeightSync",
    "load_rollout_scenario",
    "longest",
    "rollout_scenario_from_text",
    "with_stop_fraction",
]

ROLLOUT_CATALOG: Final = SCENARIO_CATALOG / "rollouts"


def load_rollout_scenario(name_or_path: str | Path) -> RolloutScenario:
    """Returns a rollout scenario from a file or from those that ship with the tool.

    Raises:
        InputError: every violation of the file, each with its line and nearest fix.
    """
    return validate(RolloutScenario, _open(name_or_path, ROLLOUT_CATALOG, "rollout scenario"))


def rollout_scenario_from_text(text: str, file: str = "rollout.yaml") -> RolloutScenario:
    """Returns a rollout scenario from YAML text; raises as `load_rollout_scenario` does."""
    return validate(RolloutScenario, parse_yaml(text, file))


def with_stop_fraction(scenario: RolloutScenario, stop_fraction: float) -> RolloutScenario:
    """Returns the scenario at another lambda.

    Raises:
        InputError: lambda outside [0.01, 1], or a round that another rule ends.
    """
    if not MIN_STOP_FRACTION <= stop_fraction <= 1:
        raise InputError(
            Violation(
                field="lambda",
                value=f"{stop_fraction:g}",
                rule=f"must be at least {MIN_STOP_FRACTION} and at most 1",
                nearest_fix="1 waits for every attempt; 0.9 parks the slowest tenth",
            )
        )
    if scenario.stop.rule != "lambda":
        raise InputError(
            Violation(
                field="lambda",
                value=f"{stop_fraction:g}",
                rule=f"stop.rule: {scenario.stop.rule} ends the rounds of this scenario",
                nearest_fix="leave lambda out, or use stop.rule: lambda",
            )
        )
    return scenario.model_copy(update={"stop_fraction": stop_fraction})
