"""A miniature of benchmarks/kill_resume.py, which kills fifty times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ranks die with their launcher on Linux")
def test_a_run_that_is_killed_three_times_ends_with_the_same_bits():
    done = subprocess.run(
        [sys.executable, "benchmarks/kill_resume.py", "--kills", "3", "--no-moves"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["kills"], figures["survived"], figures["bit_identical"]) == (3, 3, True)
    assert set(figures["by_kind"]) == {"no_name", "half_file", "launcher"}
