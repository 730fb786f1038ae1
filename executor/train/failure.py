"""What a rank that cannot go on says, and to whom: the run's folder, the terminal, torchrun."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Final

from flopwright.errors import EXIT_BAD_INPUT, InputError
from flopwright.executor.launch.failure import (
    Record,
    cause,
    cause_text,
    last_seen,
    lost_another,
    no_place_to_write,
    read_records,
)
from flopwright.executor.launch.request import ERROR_DIR, RESERVE_FILE, write_json

# torchrun ends all ranks of a node as soon as one has ended: every rank finds the same
# mistake in the input, and this leaves the node's first rank, whose output is shown, the word.
_AFTER_YOU_S: Final = 10.0
_RESERVE_BYTES: Final = 2**17
# torchrun shows what stands in this file as the cause, below all other output.
_TORCHRUN_FILE: Final = "TORCHELASTIC_ERROR_FILE"


def report_failure(out_dir: Path, error: Exception) -> int:
    """Records and tells why this rank ends; returns its exit code.

    The rank that caused the end says so in full, rank 0 repeats it (the others' output is
    often hidden), and any other rank names the cause in a line.
    """
    rank = os.environ.get("RANK", "0")
    error = no_place_to_write(error, f"rank {rank}") or error
    if isinstance(error, InputError) and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_AFTER_YOU_S)
    own = _record(error)
    kept = _keep(out_dir, own)
    first = cause(read_records(out_dir)) if kept else own
    text = cause_text(first, last_seen(out_dir))
    if kept:
        text += f"\nmore in {out_dir / ERROR_DIR}"
    if first["rank"] == own["rank"]:
        if not lost_another(own):  # else torchrun knows more: which rank ended, by which signal
            _tell_torchrun(text, own)
    elif own["rank"] != 0:
        text = f"rank {own['rank']} ends because rank {first['rank']} failed"
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    return EXIT_BAD_INPUT if isinstance(error, InputError) else 1


def _record(error: Exception) -> Record:
    violations = error.violations if isinstance(error, InputError) else ()
    return {
        "rank": int(os.environ.get("RANK", "0")),
        "time_s": time.time(),
        "type": type(error).__name__,
        "message": "; ".join([str(error), *getattr(error, "__notes__", ())]),
        "violations": [v.as_dict() for v in violations],
        "traceback": "".join(traceback.format_exception(error)),
    }


def _keep(out_dir: Path, record: Record) -> bool:
    """Writes the record into the run's folder.

    Returns False where it belongs to another run, or cannot be written.
    """
    if not out_dir.is_dir() or any(v["field"] == "--out" for v in record["violations"]):
        return False
    folder = out_dir / ERROR_DIR
    for _ in range(2):
        try:
            folder.mkdir(exist_ok=True)
            write_json(folder / f"rank-{record['rank']:05d}.json", record)
        except OSError:  # the disk may be full, which is to be told all the same
            with suppress(OSError):
                (out_dir / RESERVE_FILE).unlink(missing_ok=True)
        else:
            return True
    return False


def keep_reserve(out_dir: Path) -> None:
    """Keeps room on the disk for the record of why a run ended, should it run full."""
    (out_dir / RESERVE_FILE).write_bytes(bytes(_RESERVE_BYTES))


def _tell_torchrun(text: str, record: Record) -> None:
    path = os.environ.get(_TORCHRUN_FILE)
    if not path:
        return
    extra = {"py_callstack": text, "timestamp": str(int(record["time_s"]))}
    data = {"message": {"message": text, "extraInfo": extra}}
    Path(path).write_text(json.dumps(data), encoding="utf-8")
