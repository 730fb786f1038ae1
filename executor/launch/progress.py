"""A run's progress as lines of text, for whoever watches it without a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

# A phase ("phase", "share"), a note (a phase with "note": true, which is said whole and each
# time) or where a plan is ("plan", "step", "steps", "loss", "tokens_per_s", "eta_s"): the lines
# of the progress file.
Progress = Callable[[dict[str, Any]], None]

STEPS_PER_LINE: Final = 20


def progress_lines(write: Callable[[str], None]) -> Progress:
    """Returns a callback that writes a line a phase, and a plan's first, 20th, 40th, ... and last.

    Args:
        write: called with each line, without its end.
    """
    said: set[str] = set()
    last: dict[str, int] = {}

    def show(event: dict[str, Any]) -> None:
        if event.get("note"):
            write(event["phase"])
            return
        if "plan" not in event:
            phase = event["phase"].partition(":")[0]  # "probe: gemm 64x64x64" is one phase
            if phase not in said:
                said.add(phase)
                write(phase)
            return
        plan, step = event["plan"], event["step"]
        due = plan not in last or step // STEPS_PER_LINE > last[plan] // STEPS_PER_LINE
        if due or step == event["steps"]:
            last[plan] = step
            write(step_text(event))

    return show


def note(text: str) -> dict[str, Any]:
    """Returns the event that says something once."""
    return {"phase": text, "share": 0.0, "note": True}


def progress_writer(path: Path, show: Progress) -> Progress:
    """Returns a callback that adds each event to the progress file and then shows it."""

    def say(event: dict[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")
        show(event)

    return say


def step_text(event: dict[str, Any]) -> str:
    """Returns where a plan is, on one line."""
    return (
        f"{event['plan']}: step {event['step']}/{event['steps']}, loss {event['loss']:.4f}, "
        f"{event['tokens_per_s']:,.0f} tokens/s, {event['eta_s']:.0f} s left"
    )
