"""Starts one process a rank of a program of checks and reads what each has written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_TIMEOUT_S = 600


def run_ranks(program: Path, world: int, folder: Path) -> list[dict[str, Any]]:
    """Returns FOLDER/rank-N.json of every rank of `program WORLD RANK FOLDER`."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_COMPILE_DISABLE": "1",
        # DeepSpeed asks these when it adopts the process group.
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(world),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(world), str(rank), str(folder)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [rank.communicate(timeout=_TIMEOUT_S)[0] for rank in ranks]
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output[-4000:]
    return [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(world)]
