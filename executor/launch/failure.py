"""Why a run ended: what its ranks wrote about it, and which to believe. Imports no torch."""

from __future__ import annotations

import errno
import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.executor.launch.request import ERROR_DIR, PROGRESS_FILE

# One rank's end: rank, time_s, type, message, violations, traceback.
Record = dict[str, Any]

_KILLED: Final = "was killed by"
# A rank's end in torchrun's report.
_ENDS: Final = re.compile(r"^ *rank +: (\d+).*\n *exitcode +: (-?\d+)", flags=re.MULTILINE)
# What gloo and NCCL say when the process at the other end is gone.
_LOST_ANOTHER: Final = ("closed by peer", "reset by peer", "remote process exited")


# What a file system says that has no room, or lets nobody write.
_NO_PLACE: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
)


def no_place_to_write(error: BaseException, who: str) -> InputError | None:
    """Returns what to say of an error of the file system that the user can mend, else None.

    Args:
        who: that could not write, in words.
    """
    if not isinstance(error, OSError) or error.errno not in _NO_PLACE:
        return None
    notes = "; ".join(getattr(error, "__notes__", ()))
    return InputError(
        Violation(
            file=str(error.filename or ""),
            rule=f"{who} could not write: {error.strerror}{' ' if notes else ''}{notes}",
            nearest_fix="make room or allow writing, then resume: earlier checkpoints are as "
            "they were",
        )
    )


def read_records(out_dir: Path) -> list[Record]:
    """Returns what the ranks wrote about their ends, in rank order."""
    return [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((out_dir / ERROR_DIR).glob("rank-*.json"))
    ]


def cause(records: Sequence[Record]) -> Record:
    """Returns the record that explains the others: an input error, or the earliest.

    The ranks that fail later do so because the first one is gone.
    """
    invalid = next((r for r in records if r["violations"]), None)
    return invalid or min(records, key=lambda r: (lost_another(r), float(r["time_s"])))


def lost_another(record: Record) -> bool:
    """Returns whether the rank ended because it no longer reached another one."""
    return any(words in record["message"] for words in _LOST_ANOTHER)


def cause_text(record: Record, seen: str = "", gone: str = "") -> str:
    """Returns the cause in words: every violation of an input error, else rank and error.

    Args:
        seen: where the run was (see `last_seen`), for a rank that can no longer say it itself.
        gone: which rank ended first, and how (see `first_to_end`), where torchrun knows.
    """
    violations = record["violations"]
    if lost_another(record):
        killed = (
            gone if _KILLED in gone else "a rank ended without a word (killed, or out of memory?)"
        )
        return f"{killed}{seen}; rank {record['rank']} noticed: {record['message']}"
    if not violations:
        return f"rank {record['rank']} failed: {record['type']}: {record['message']}"
    count = len(violations)
    lines = [f"  {line}" for line in record["message"].splitlines()]
    return "\n".join([f"{count} problem{'s' if count > 1 else ''} with the input:", *lines])


def how_it_ended(exit_code: int) -> str:
    """Returns how a process ended, in words: its exit code, or the signal (code < 0)."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"{_KILLED} {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"{_KILLED} signal {-exit_code}"


def first_to_end(torchrun_log: str) -> str:
    """Returns which rank ended first, and how, by torchrun's last report; "" where it has none.

    A rank that was killed says nothing itself.
    """
    _, _, report = torchrun_log.rpartition("\nFailures:")
    ends = [(int(rank), int(code)) for rank, code in _ENDS.findall(report)]
    # torchrun looks so seldom that who misses the killed rank may seem to have failed before it
    killed = [end for end in ends if end[1] < 0 and end[1] != -signal.SIGTERM]
    if not ends:
        return ""
    rank, code = (killed or ends[-1:])[0]  # the last one is its root cause
    return f"rank {rank} {how_it_ended(code)}"


def last_seen(out_dir: Path) -> str:
    """Returns where the run was when it was last heard of, to be added to a sentence.

    It is "" before its first turn.
    """
    path = out_dir / PROGRESS_FILE
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:  # it ended within this line
            continue
        if "plan" in event:
            return (
                f"; plan '{event['plan']}' was last heard of after {event['step']} of "
                f"{event['steps']} steps"
            )
    return ""
