"""Every Triton kernel in the interpreter, against float64; one process a group.

Whether `triton.jit` interprets is decided when it decorates, so each group has its own
process, in which the ops are told to run their kernels on CPU tensors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
# Strides are asked about here too: the same tests as of torch's own kernels.
GROUPS = (*sorted(HERE.glob("interpreted/check_*.py")), HERE / "test_layouts.py")
NAMES = [path.stem.removeprefix("check_").removeprefix("test_") for path in GROUPS]


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS, ids=NAMES)
def test_kernels_in_the_interpreter(group: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "FLOPWRIGHT_KERNELS": "triton",
        "FLOPWRIGHT_SKIPS_FILE": "",
    }
    environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(group)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300,
        cwd=Path(__file__).resolve().parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
