"""One launcher at a time in a run's folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopwright.errors import InputError
from flopwright.executor.launch import local
from flopwright.executor.launch.checks import LaunchOptions
from flopwright.executor.launch.lock import alone_in
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file

HOLDS = """
import sys, time
from pathlib import Path
from flopwright.executor.launch.lock import alone_in
with alone_in(Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(60)
"""


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    with alone_in(tmp_path):
        with pytest.raises(InputError, match="another run is at work"), alone_in(tmp_path):
            pass
        # what a run starts does not keep the folder when the run has ended
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with alone_in(tmp_path):
            assert not list(tmp_path.iterdir())
    finally:
        child.kill()
        child.wait()


def test_a_killed_launcher_gives_its_folder_back(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"in\n"
        with pytest.raises(InputError), alone_in(tmp_path):
            pass
        other.kill()
    with alone_in(tmp_path):
        pass


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_launch_in_the_folder_is_refused_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was started")

    monkeypatch.setattr(local, "_supervise", never)
    mini = load_scenario("kimi_k2_mini_2cpu_fp32")
    plan = tmp_path / "plan.yaml"
    plan.write_text(dump_yaml(make_plan_file(mini, ParallelPlan(micro_batch_size=1), "plan")))
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("words " * 1000)
    out.mkdir()
    options = LaunchOptions(text=text, tokenizer="characters", steps=1, resume=resume)
    with alone_in(out), pytest.raises(InputError, match="another run is at work"):
        local.launch([plan], out, options)
    assert not list(out.iterdir())
