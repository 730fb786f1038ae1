"""A run goes on to the bit under the plan that saved it, and within rounding under any other.

On the same plan weights, moments, momentum, master copies and losses are those of the run that
did not stop, bit by bit; also where a run goes back to what it saved itself, as after a loss
spike. From the single process's checkpoint every plan arrives where the single process does: in
float64 to 1e-7 of each tensor's norm, in fp32 to 1e-4. `make test` runs a plan of each library and
axis, CI (FLOPWRIGHT_REQUIRE_SERVICES=1) everything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

pytestmark = pytest.mark.slow
EVERYTHING: Final = os.environ.get("FLOPWRIGHT_REQUIRE_SERVICES") == "1"
WORLDS: Final = (1, 2, 4) if EVERYTHING else (1, 2)
FAR: Final = {"fp64": 1e-7, "fp32": 1e-4}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder, found = tmp_path_factory.mktemp("resume"), []
    program = str(Path(__file__).parent / "resume_ranks.py")
    for world in WORLDS:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={world}", program, str(folder)]
        command += [] if EVERYTHING else ["--quick"]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_COMPILE_DISABLE": "1",
        }
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        found += json.loads((folder / f"report-{world}.json").read_text())
    return found


def test_same_plan_goes_on_bit_for_bit(records: list[dict[str, Any]]) -> None:
    assert len(records) > (30 if EVERYTHING else 10)
    for record in records:
        assert record["differing"] == [], record
        assert record["differing_back"] == [], record
        assert record["same_losses"], record


def test_any_plan_goes_on_from_the_single_process(records: list[dict[str, Any]]) -> None:
    moved = [r for r in records if "far" in r]
    assert len(moved) > (20 if EVERYTHING else 5)
    for record in moved:
        assert record["far"][0] <= FAR[record["dtype"]], record
