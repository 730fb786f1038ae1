"""Goes through a run's phases, and ends itself by SIGKILL when it comes to a boundary.

    phase_kills.py RUN_PLAN OUT TEXT FOLDER:EVENT

FOLDER is a phase's (`2-anneal`); EVENT what its run says when it is to happen ("train"), or
nothing for the moment at which the phase before it has ended and this one is not yet started.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from flopwright.executor.launch.checks import LaunchOptions
from flopwright.executor.launch.phases import launch_phases


def main() -> None:
    """Goes on with the run in OUT."""
    plan, out, text, at = sys.argv[1:]
    folder, event = at.split(":")
    now = ""

    def show(line: dict[str, Any]) -> None:
        nonlocal now
        said = str(line.get("phase", ""))
        if said.startswith("phase "):
            now, said = said.removeprefix("phase "), ""
        if at != ":" and "phase" in line and (now, said) == (folder, event):
            os.kill(os.getpid(), signal.SIGKILL)

    options = LaunchOptions(
        text=Path(text), tokenizer="characters", nproc=2, checkpoint_every=8, resume=True
    )
    launch_phases(Path(plan), Path(out), options, show)


if __name__ == "__main__":
    main()
