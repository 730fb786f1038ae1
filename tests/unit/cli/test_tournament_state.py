"""What a tournament's folder knows survives its file, and a folder holds one tournament."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopwright.cli._tournament_state import Asked, State, load_state, save_state
from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.tournament import Contender, Refused


def asked(**changes: object) -> Asked:
    values: dict[str, object] = {
        "scenario": "s", "scenario_hash": "h", "top": 2, "random": 2, "seed": 0,
        "steps_per_turn": 2, **changes,
    }  # fmt: skip
    return Asked.model_validate(values)


def state(of: Asked) -> State:
    plan = ParallelPlan(dp_shard=2)
    return State(
        asked=of,
        contenders=(Contender(name="a", plan=plan, origins=("random",), prior_step_s=1.0),),
        refused=(Refused(name="b", reason="no"),),
        left={"c": "slow"},
        spent_s=3.5,
    )


@pytest.mark.parametrize("calibration", [None, "cal-1"])
def test_a_state_survives_its_file(tmp_path: Path, calibration: str | None) -> None:
    kept = state(asked(calibration=calibration))
    save_state(tmp_path, kept)
    assert load_state(tmp_path, asked(calibration=calibration)) == kept


def test_a_new_folder_begins_a_tournament(tmp_path: Path) -> None:
    assert load_state(tmp_path / "new", asked()) == State(asked=asked())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("changes", [{"seed": 1}, {"calibration": "c"}, {"scenario_hash": "x"}])
def test_other_options_are_refused_by_name(tmp_path: Path, changes: dict[str, object]) -> None:
    save_state(tmp_path, state(asked()))
    with pytest.raises(InputError, match=next(iter(changes))):
        load_state(tmp_path, asked(**changes))


def test_a_broken_state_is_an_error_of_the_input(tmp_path: Path) -> None:
    (tmp_path / "tournament.json").write_text('{"asked": ')
    with pytest.raises(InputError, match="cannot be read"):
        load_state(tmp_path, asked())
