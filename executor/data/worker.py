"""A rank's data worker: `python -m flopwright.executor.data.worker`, started by `prefetch.py`.

It is told on its standard input what to read; its arguments, the folder and the rank, are for
whoever lists processes. It makes one step's batch after the other and writes each to its standard
output: a line of JSON and the bytes of the arrays. So many batches as it was told are made ahead;
then it waits for a line that says that one has been read. It reads nothing that torch is needed
for.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from flopwright.errors import InputError
from flopwright.executor.data.opening import RunData, open_data
from flopwright.executor.data.prefetch import FIELDS, Reading
from flopwright.executor.launch.machine import die_with_parent

Frame = list[bytes]


def main() -> NoReturn:
    """Writes the batches of the steps that were asked for, and ends the process."""
    die_with_parent()
    # whoever tells the ranks to end tells this process too; its rank still needs it then
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    reading = Reading.model_validate_json(sys.stdin.buffer.readline())
    waiting: queue.Queue[Frame | None] = queue.Queue()
    room = threading.Semaphore(reading.ahead)
    writer = threading.Thread(target=_write, args=(sys.stdout.buffer, waiting), daemon=True)
    writer.start()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, room), daemon=True).start()
    code = 0
    try:
        data = opened(reading)
        for step in range(reading.first_step, reading.steps):
            room.acquire()
            waiting.put(make_frame(data, reading, step))
    except InputError as error:
        waiting.put([_line({"violations": [v.as_dict() for v in error.violations]})])
        code = 2
    waiting.put(None)
    writer.join()
    os._exit(code)  # the thread that listens holds what an orderly end would wait for


def opened(reading: Reading) -> RunData:
    """Returns the run's data as this reader sees it."""
    data = open_data(
        Path(reading.text) if reading.text else None,
        Path(reading.folder),
        reading.workload,
        stream=reading.stream,
        share=(reading.rank, reading.world_size),
    )
    return replace(data, skipped=reading.skipped)


def make_frame(data: RunData, reading: Reading, step: int) -> Frame:
    """Returns a step's batch as it is written: a line that says what follows, and arrays."""
    batch = data.rank_batch(step, reading.dp_rank, reading.dp, reading.micro_batch_size)
    arrays = {n: a for n in FIELDS if (a := getattr(batch, n)) is not None}
    head: dict[str, Any] = {
        "step": step,
        "total_weight": batch.total_weight,
        "arrays": [[name, a.dtype.str, a.shape] for name, a in arrays.items()],
    }
    return [_line(head), *(np.ascontiguousarray(a).tobytes() for a in arrays.values())]


def _line(head: dict[str, Any]) -> bytes:
    return json.dumps(head).encode() + b"\n"


def _listen(told: BinaryIO, room: threading.Semaphore) -> None:
    """Makes room for another batch for each that the rank has read; ends with the rank."""
    while told.readline():
        room.release()
    os._exit(0)


def _write(out: BinaryIO, waiting: queue.Queue[Frame | None]) -> None:
    """Writes frames in their order until there is none, or nobody reads them."""
    try:
        while (frame := waiting.get()) is not None:
            for part in frame:
                out.write(part)
            out.flush()
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
