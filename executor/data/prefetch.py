"""Batches made before their steps come, by a process of its own beside each rank.

The process (worker.py) reads, tokenises and packs while the rank computes; no more batches than
asked for wait in it. What it makes is what the rank would have read: which tokens a step has
depends on the step alone. If it ends, the rank says so and ends too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from flopwright.errors import InputError, Violation
from flopwright.executor.data.skips import Spans
from flopwright.executor.data.token_batch import TokenBatch
from flopwright.executor.launch.failure import how_it_ended
from flopwright.spec.base import Spec
from flopwright.spec.workload import Workload

WORKER: Final = "flopwright.executor.data.worker"
FIELDS: Final = ("tokens", "starts", "weights")


class DataWorkerError(Exception):
    """A data worker that ended before its rank had read what it needs."""


class Reading(Spec):
    """What a data worker reads, for whom, and how far ahead.

    Attributes:
        text, stream: as `opening.open_data` takes them; folder: of the prepared data.
        skipped: samples that are left out.
        first_step: the first of the steps .. steps - 1 that it makes.
        ahead: batches that may wait for the rank.
        rank: that the worker belongs to, of `world_size`.
    """

    text: str | None
    folder: str
    stream: bool
    workload: Workload
    skipped: Spans = ()
    dp_rank: NonNegativeInt
    dp: PositiveInt
    micro_batch_size: PositiveInt
    first_step: NonNegativeInt = 0
    steps: PositiveInt
    ahead: PositiveInt
    rank: NonNegativeInt
    world_size: PositiveInt


class Read(Protocol):
    """As `Ordered.rank_batch`."""

    def __call__(self, step: int, dp_rank: int, dp: int, micro_batch_size: int) -> TokenBatch:
        """Returns a rank's micro-batches of a step."""
        ...


@dataclass(slots=True)
class Prefetcher:
    """A rank's end of its data worker, which is started when the first batch is asked for."""

    reading: Reading
    command: tuple[str, ...] = (sys.executable, "-m", WORKER)
    _process: subprocess.Popen[bytes] | None = None
    _next: int = 0

    def reader(self, skipped: Spans) -> Read:
        """Returns what reads batches, of data that leaves out these samples."""
        if skipped != self.reading.skipped:
            self.close()
            self.reading = self.reading.model_copy(update={"skipped": skipped})
        return self.rank_batch

    def rank_batch(self, step: int, dp_rank: int, dp: int, micro_batch_size: int) -> TokenBatch:
        """Returns a step's batch; from another than the next step the worker begins again.

        Raises:
            DataWorkerError: the worker has ended.
            InputError: it says what is wrong with the data.
        """
        of = (self.reading.dp_rank, self.reading.dp, self.reading.micro_batch_size)
        assert of == (dp_rank, dp, micro_batch_size)
        if self._process is None or step != self._next:
            self._start(step)
        head = self._head(step)
        assert head["step"] == step
        arrays = {name: self._array(dtype, shape, step) for name, dtype, shape in head["arrays"]}
        self._make_room()
        self._next = step + 1
        return TokenBatch(total_weight=head["total_weight"], **arrays)

    def _make_room(self) -> None:
        """Lets the worker make another batch."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(
            BrokenPipeError
        ):  # it has made the last one, or has ended: the next read tells
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends the worker."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        process.kill()
        process.wait()

    def _start(self, step: int) -> None:
        self.close()
        # what it is for, in words, for whoever looks at the processes of a machine
        named = (*self.command, self.reading.folder, f"rank-{self.reading.rank}")
        process = subprocess.Popen(named, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._process = process
        assert process.stdin is not None
        reading = self.reading.model_copy(update={"first_step": step})
        try:
            process.stdin.write(json.dumps(reading.to_data()).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._ended(step) from None

    def _head(self, step: int) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._ended(step)
        head: dict[str, Any] = json.loads(line)
        if "violations" in head:
            raise InputError([Violation(**v) for v in head["violations"]])
        return head

    def _array(self, dtype: str, shape: list[int], step: int) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise self._ended(step)
        return np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)

    def _ended(self, step: int) -> DataWorkerError:
        """Returns what is said of a worker that has closed its end."""
        assert self._process is not None
        how = how_it_ended(self._process.wait())
        return DataWorkerError(
            f"the data worker of rank {self.reading.rank} (process {self._process.pid}) {how} "
            f"before it had read step {step}"
        )
