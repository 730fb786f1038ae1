"""The commands of docs/checkpoints.md."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "checkpoints.md").read_text()


@pytest.mark.slow
def test_the_documented_run_goes_on(tmp_path):
    block = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)[0]
    (tmp_path / "scenarios").mkdir()
    shutil.copy(ROOT / "scenarios" / "first_steps.txt", tmp_path / "scenarios")
    environment = os.environ | {
        "FLOPWRIGHT_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    for program, *arguments in map(shlex.split, block.splitlines()):
        assert program == "flopwright"
        done = subprocess.run(
            [sys.executable, "-m", "flopwright", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "long"
    steps = [json.loads(line)["step"] for line in (run / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(90))
    kept = sorted(p.name for p in (run / "checkpoint-first").iterdir())
    assert kept == ["step-00000080", "step-00000090"]
