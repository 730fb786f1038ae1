"""A data worker makes what its rank would read, and its end is named."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flopwright.errors import InputError
from flopwright.executor.data.opening import RunData, open_data, prepare_data
from flopwright.executor.data.prefetch import DataWorkerError, Prefetcher, Reading
from flopwright.spec.load import load_scenario
from flopwright.spec.packing import Packing

SCENARIO = load_scenario("kimi_k2_mini_2cpu_fp32")
WORKLOAD = SCENARIO.workload.model_copy(
    update={"seq_len": 8, "global_batch_size": 8, "packing": Packing()}
)


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "streamed"])
def place(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Path, Path, bool]:
    folder = tmp_path_factory.mktemp("prefetch")
    text = folder / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i:02d}.txt").write_text(f"document {i} " * (1 + i % 7))
    prepare_data(
        text, SCENARIO.model, WORKLOAD, folder / "data", "characters", stream=request.param
    )
    return text, folder / "data", request.param


@pytest.fixture
def prefetcher(place: tuple[Path, Path, bool]) -> Iterator[Prefetcher]:
    text, folder, stream = place
    found = Prefetcher(
        Reading(
            text=str(text),
            folder=str(folder),
            stream=stream,
            workload=WORKLOAD,
            dp_rank=1,
            dp=2,
            micro_batch_size=2,
            steps=50,
            ahead=2,
            rank=0,
            world_size=1,
        )
    )
    yield found
    found.close()


@pytest.fixture
def data(place: tuple[Path, Path, bool]) -> RunData:
    text, folder, stream = place
    return open_data(text, folder, WORKLOAD, stream=stream)


def same(prefetcher: Prefetcher, data: RunData, step: int) -> bool:
    mine = prefetcher.reader(data.skipped)(step, 1, 2, 2)
    theirs = data.rank_batch(step, 1, 2, 2)
    arrays = (np.array_equal(getattr(mine, n), getattr(theirs, n)) for n in FIELDS)
    return all(arrays) and mine.total_weight == theirs.total_weight


FIELDS = ("tokens", "starts", "weights")


@pytest.mark.slow
def test_batches_are_those_that_the_rank_would_read(prefetcher: Prefetcher, data: RunData) -> None:
    assert all(same(prefetcher, data, step) for step in range(5))
    assert all(same(prefetcher, data, step) for step in (20, 21, 2))  # a run that goes back
    skipping = replace(data, skipped=((16, 40),))
    assert all(same(prefetcher, skipping, step) for step in (3, 4))


def read_all(prefetcher: Prefetcher, steps: range) -> None:
    for step in steps:
        prefetcher.rank_batch(step, 1, 2, 2)


def test_a_worker_that_is_killed_is_named_with_rank_and_step(
    prefetcher: Prefetcher, data: RunData
) -> None:
    assert same(prefetcher, data, 0)
    process = prefetcher._process
    assert process is not None
    process.send_signal(signal.SIGTERM)  # sent to a whole process group: its rank still needs it
    assert same(prefetcher, data, 1)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(DataWorkerError) as caught:
        read_all(prefetcher, range(2, 50))  # what it had ready is still read
    assert f"data worker of rank 0 (process {process.pid}) was killed by SIGKILL" in str(
        caught.value
    )
    assert "before it had read step" in str(caught.value)


def test_what_is_wrong_with_the_data_is_said_by_the_rank(
    prefetcher: Prefetcher, tmp_path: Path
) -> None:
    wrong = prefetcher.reading.model_copy(update={"folder": str(tmp_path)})
    with pytest.raises(InputError, match=str(tmp_path)):
        Prefetcher(wrong).rank_batch(0, 1, 2, 2)
    gone = Prefetcher(prefetcher.reading, command=(sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(DataWorkerError, match="ended with exit code 3"):
        gone.rank_batch(0, 1, 2, 2)
