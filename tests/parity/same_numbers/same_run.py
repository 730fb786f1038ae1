"""The same numbers under every plan: runs the plans of each world size, prints what differs.

    python tests/parity/same_numbers/same_run.py [--everything] [--world N] [--out FOLDER]

One launch a world size. Without --everything one plan of each kind, for fewer steps. The
differences are relative: of the loss, the largest over steps; of the weights, the norm of a
tensor's difference to the norm of the tensor, the largest over tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from same_plans import FREE_STEPS, QUICK_STEPS, STEPS

HERE: Final = Path(__file__).parent
WORLDS: Final = (1, 2, 4)


def run_world(
    world: int, folder: Path, *, everything: bool, long: bool = False
) -> list[dict[str, Any]]:
    """Returns the records of one world size; `folder` has the references."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_COMPILE_DISABLE": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world}", str(HERE / "same_ranks.py"), str(folder), str(folder)]
    command += ["--everything"] * everything + ["--long"] * long
    _run(command, environment)
    found: list[dict[str, Any]] = json.loads((folder / f"report-{world}.json").read_text())
    return found


def write_references(folder: Path, *, everything: bool) -> None:
    """Trains the single process."""
    steps = STEPS if everything else max(QUICK_STEPS, FREE_STEPS)
    program = [sys.executable, str(HERE / "same_reference.py"), str(folder), str(steps)]
    _run(program, {**os.environ, "OMP_NUM_THREADS": "1"})


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command[-4:]} failed:\n{done.stdout[-3000:]}{done.stderr[-6000:]}")


def table(records: list[dict[str, Any]]) -> str:
    """Returns the records as a table in Markdown."""
    lines = ["| ranks | plan | mode | steps | loss | weights |", "|---|---|---|---|---|---|"]
    for r in records:
        weights = f"{r['weights']:.1e}" if "weights" in r else ""
        lines.append(
            f"| {r['world_size']} | {r['plan']} | {r['mode']} | {r['steps']} "
            f"| {r['loss']:.1e} | {weights} |"
        )
    for mode in "abc":
        those = [r for r in records if r["mode"] == mode]
        if those:
            loss = max(r["loss"] for r in those)
            weights = max((r["weights"] for r in those if "weights" in r), default=None)
            shown = "" if weights is None else f"{weights:.1e}"
            lines.append(f"| | largest of {len(those)} | {mode} | | {loss:.1e} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the world sizes asked for and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--everything", action="store_true")
    parser.add_argument("--world", type=int, choices=WORLDS, action="append")
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = parsed.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_references(folder, everything=parsed.everything)
        records = []
        for world in parsed.world or WORLDS:
            every = parsed.everything
            records += run_world(world, folder, everything=every, long=every)
    sys.stdout.write(table(records) + "\n")


if __name__ == "__main__":
    main()
