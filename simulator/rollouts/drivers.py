"""Which event loop runs a scenario's phases: the reference or the compiled one."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Final, Literal

from flopwright.errors import InputError, Violation
from flopwright.simulator.rollouts.compiled.folder import is_compiled
from flopwright.simulator.rollouts.state import PhaseResult, PhaseState
from flopwright.spec.rollout import RolloutScenario, longest

Driver = Callable[[PhaseState, bool], PhaseResult]
Kind = Literal["auto", "simpy", "compiled"]

# Compiling takes about as long as this many events of the reference; loading what was
# compiled before, as long as these few.
WORTH_COMPILING: Final = 200_000
WORTH_LOADING: Final = 20_000
TOO_MANY: Final = 3_000_000  # about five minutes of the reference


def expected_events(scenario: RolloutScenario, rounds: int) -> float:
    """Returns about how many events so many rounds have: turns and chunks of attempts."""
    each = 1.0
    agent, chunk = scenario.agent, scenario.schedule.chunk_tokens
    mean = _rough_mean(scenario)
    if agent is not None and agent.tokens_per_turn is not None:
        each += 2 * mean / agent.tokens_per_turn
    elif agent is not None and agent.turns is not None:
        most = longest(agent.turns) or getattr(agent.turns, "mean", None)
        each += 2.0 * (10 if most is None else most)
    if chunk is not None:
        each += mean / chunk
    return rounds * scenario.num_attempts * each


def _rough_mean(scenario: RolloutScenario) -> float:
    from flopwright.simulator.rollouts.closed_forms import mean_length

    return mean_length(scenario.lengths)


def driver_for(scenario: RolloutScenario, rounds: int, kind: Kind) -> Driver:
    """Returns the loop for these rounds.

    Raises:
        InputError: the compiled loop is asked for, or needed, and numba is not installed.
    """
    events = expected_events(scenario, rounds)
    there = find_spec("numba") is not None
    few = WORTH_LOADING if there and is_compiled() else WORTH_COMPILING
    if kind == "simpy" or (kind == "auto" and (events < few or not there)):
        if kind == "auto" and events > TOO_MANY:
            raise InputError(_refusal(f"about {events:.2g} events are too many to run slowly"))
        from flopwright.simulator.rollouts.generation import generate

        return generate
    if not there:
        raise InputError(_refusal("the compiled loop is not installed"))
    from flopwright.simulator.rollouts.compiled.run import generate as compiled

    return compiled


def _refusal(rule: str) -> Violation:
    return Violation(
        field="loop",
        rule=rule,
        nearest_fix="pip install 'flopwright[fast]' compiles the loop; "
        "loop simpy runs it slowly all the same",
    )
