"""What a tournament's folder knows: enough to go on after it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from pydantic import Field, NonNegativeFloat, NonNegativeInt, ValidationError

from flopwright.errors import InputError, Violation
from flopwright.planner.tournament import Contender, Refused
from flopwright.planner.tournament_result import TournamentResult
from flopwright.spec.base import Spec

STATE_FILE: Final = "tournament.json"
RESULT_FILE: Final = "result.json"
HEAT: Final = "heat"
RACE: Final = "race"


class Asked(Spec):
    """What makes two tournaments the same: a folder holds one."""

    scenario: str
    scenario_hash: str
    top: int
    random: int
    seed: int
    steps_per_turn: int
    calibration: str | None = None  # what is not known is left out of the file


class State(Spec):
    """How far a tournament is.

    Attributes:
        contenders: of the heat, and from the race on all, priced.
        learnt: id of the calibration that the choice was made with; "" before that.
        chosen, uncalibrated: names; "" before the choice.
        left: who left the race early, and why.
        spent_s: seconds of running so far.
        legs: launches of the race that have come to their end.
    """

    asked: Asked
    contenders: tuple[Contender, ...] = ()
    refused: tuple[Refused, ...] = ()
    heat_done: bool = False
    learnt: str = ""
    chosen: str = ""
    uncalibrated: str = ""
    left: dict[str, str] = Field(default_factory=dict)
    spent_s: NonNegativeFloat = 0.0
    legs: NonNegativeInt = 0
    finished: bool = False


def load_state(folder: Path, asked: Asked) -> State:
    """Returns the state of a folder, a new one where it is new or empty.

    Raises:
        InputError: the folder holds something else, or another tournament.
    """
    path = folder / STATE_FILE
    if not path.exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise _wrong(folder, "exists and is not the folder of a tournament")
        return State(asked=asked)
    try:
        state = State.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (ValidationError, ValueError) as error:
        raise _wrong(folder, f"its {STATE_FILE} cannot be read") from error
    differs = [
        f"{name} {getattr(state.asked, name)}"
        for name in Asked.model_fields
        if getattr(state.asked, name) != getattr(asked, name)
    ]
    if differs:
        raise _wrong(folder, f"holds another tournament: {', '.join(differs)}")
    return state


def save_state(folder: Path, state: State) -> None:
    """Writes the state, all of it or nothing."""
    _write(folder / STATE_FILE, state)


def save_result(folder: Path, result: TournamentResult) -> None:
    """Writes the result, all of it or nothing."""
    _write(folder / RESULT_FILE, result)


def _write(path: Path, record: Spec) -> None:
    from flopwright.simulator.calibration.files import write_atomically

    write_atomically(path, json.dumps(record.to_data(), indent=1))


def _wrong(folder: Path, rule: str) -> InputError:
    return InputError(
        Violation(field="--out", value=str(folder), rule=rule, nearest_fix="choose another folder")
    )
