"""What a run does about poison in its data, SIGTERM, a full disk, and checkpoints not its own.

One process makes all the runs (one_rank.py), with everything that unpickles replaced.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("faults")
    program = Path(__file__).parent / "one_rank.py"
    done = subprocess.run(
        [sys.executable, str(program), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def test_a_poisoned_batch_is_gone_back_from_and_left_out(report: dict[str, Any]) -> None:
    spikes = report["spikes"]
    assert spikes["recovers"]["code"] == spikes["clean"] == 0
    # as if the two batches had never been there, to the bit
    assert spikes["poisoned"] == spikes["expected"]
    (line,) = spikes["rollbacks"]
    assert (line["step"], line["back_to"], line["skipped_samples"]) == (18, 16, [[68, 76]])
    assert line["own_losses"] == {"0": line["value"]}
    assert line["value"] > line["median"] + 8 * line["scatter"]
    said = spikes["recovers"]["said"]
    assert "is a spike in step 18 of plan 'x' (its own on rank 0)" in said
    assert (
        "Going back to the checkpoint of 16 steps and leaving out the data of steps 17 to 18 "
        "(rollback 1 of 2)" in said
    )


def test_what_was_left_out_stays_left_out_after_a_resume(report: dict[str, Any]) -> None:
    spikes = report["spikes"]
    assert spikes["left"] == [24]
    assert spikes["resumed"]["code"] == 0
    assert "rollback" not in spikes["resumed"]["said"]
    assert spikes["again"] == spikes["poisoned"]


def test_rollbacks_are_bounded(report: dict[str, Any]) -> None:
    much = report["spikes"]["too much"]
    assert much["code"] == 2
    assert "is a spike in step 22 of plan 'x'" in much["said"]  # batch 24, two left out before it
    assert "it has gone back 1 times: look at its data and learning rate" in much["said"]
    assert (much["steps"], much["intact"]) == ([16, 20], True)


def test_a_loss_that_is_no_number_ends_the_run_and_is_not_saved(report: dict[str, Any]) -> None:
    found = report["no numbers"]
    end, said = found["ends"], found["ends"]["said"]
    assert end["code"] == 2
    assert "loss (nan): is not finite in step 10 of plan 'x' (its own on rank 0)" in said
    assert "nothing of it has been saved: resume from the checkpoint before it" in said
    assert "Traceback" not in said
    assert (end["steps"], end["intact"]) == ([4, 8], True)
    assert found["saved"] is True
    # nothing stays of what was wrong
    assert found["again"]["code"] == 0
    assert found["result"] == report["stops"]["whole"]


def test_a_loss_that_is_no_number_is_gone_back_from(report: dict[str, Any]) -> None:
    found = report["no numbers"]
    assert found["recovers"]["code"] == 0
    assert "is not finite in step 18 of plan 'x' (its own on rank 0)" in found["recovers"]["said"]
    assert found["recovered"] == report["spikes"]["expected"]


def test_weights_that_are_no_numbers_are_not_saved(report: dict[str, Any]) -> None:
    """Where the loss and the gradients of the step before still were."""
    end = report["no numbers"]["update"]
    assert end["code"] == 2
    assert "is not finite on rank 0 after 12 steps of plan 'x'; this has not been saved" in (
        " ".join(end["said"].split())
    )
    assert (end["steps"], end["intact"]) == ([4, 8], True)
    recovers = report["no numbers"]["update recovers"]
    assert recovers["code"] == 0
    assert (
        "is not finite in step 20 of plan 'x' (its own on rank 0). Going back to the "
        in (recovers["said"])
    )
    assert "checkpoint of 16 steps" in recovers["said"]
    assert (recovers["steps"], recovers["intact"]) == ([20, 24], True)


def test_a_data_worker_unpickles_nothing(report: dict[str, Any]) -> None:
    ahead = report["ahead"]
    assert ahead["end"]["code"] == 0, ahead["end"]["said"]
    assert ahead["workers"] >= 1  # it ran, and with what unpickles replaced
    assert ahead["losses"] == report["stops"]["whole"][2][:8]


@pytest.mark.parametrize("name", ["SIGTERM", "file"])
def test_a_run_that_is_told_to_end_finishes_its_step_and_saves(
    report: dict[str, Any], name: str
) -> None:
    stops = report["stops"]
    told, steps = stops[name], stops[f"{name} steps"]
    assert told["code"] == 0
    assert steps in {10, 11}  # the step at hand, and one more at the most
    assert told["steps"] == [8, steps]
    assert stops[f"{name} record"] == {"by": "SIGTERM", "rank": 0, "steps": {"x": steps}}
    assert (
        f"stopped by SIGTERM (rank 0 was told first): plan 'x' after {steps} steps"
        in (told["said"])
    )
    assert "done" not in told["said"]
    assert stops["again"] == 0
    assert stops["result"] == stops["whole"]


def test_every_process_group_has_a_time_limit(report: dict[str, Any]) -> None:
    """Twice that of the watch, which knows more to say."""
    limits = report["stops"]["limits_s"]
    assert len(limits) > 1
    assert set(limits) == {100.0}


def test_a_run_that_is_done_is_left_alone(report: dict[str, Any]) -> None:
    done = report["stops"]["done"]
    assert done["code"] == 0
    assert "has made its 28 steps" in done["said"]
    assert report["stops"]["done changes nothing"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("full", "rank 0 could not save step 12: "),
        ("read-only", "rank 0 could not save step 12: Permission denied"),
    ],
)
def test_where_nothing_can_be_written_the_run_says_so(
    report: dict[str, Any], name: str, said: str
) -> None:
    end = report["storage"][name]
    assert end["code"] == 2
    assert said in end["said"]
    assert "earlier checkpoints are as they were" in end["said"]
    assert "Traceback" not in end["said"]
    assert (end["steps"], end["intact"]) == ([4, 8], True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("corrupt", "rank-00000.safetensors: "),
        ("foreign", "the checkpoint was made with another model"),
        ("tokenizer", "another tokenizer"),
        ("own tokenizer", "tokenizer.json: altered"),
        ("request", "request.json: truncated"),
    ],
)
def test_a_checkpoint_that_is_not_the_runs_is_refused(
    report: dict[str, Any], name: str, said: str
) -> None:
    end = report["storage"][name]
    assert end["code"] == 2
    assert said in end["said"]
    assert "Traceback" not in end["said"]
    itself = {"corrupt": 1, "foreign": 2, "own tokenizer": 1}  # files that the test changed
    assert len(end["changed"]) <= itself.get(name, 0), end["changed"]


def test_all_the_same_the_run_goes_on_to_the_same_bits(report: dict[str, Any]) -> None:
    storage = report["storage"]
    assert storage["half again"]["code"] == 0
    assert storage["result"] == report["stops"]["whole"]
    assert storage["unmeasured"]["code"] == 0
    assert storage["unmeasured"]["steps"] == [24, 28]
    assert storage["measured"] == report["stops"]["whole"]
