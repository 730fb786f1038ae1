"""The exported bundle as a user meets it: written by the verb, started, judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import (
    SCENARIO_CATALOG,
    dump_yaml,
    load_plan,
    load_scenario,
    make_plan_file,
)

BIN = Path(sys.executable).parent
CHECK = ["continue", "look", "stop"]


def flopwright(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flopwright", *map(str, args)],
        capture_output=True, text=True, timeout=300, check=False, cwd=cwd,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plan of the smallest scenario."""
    path = tmp_path_factory.mktemp("export")
    done = flopwright("plan", "first_steps", "--out", "plan.yaml", cwd=path)
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.slow
def test_export_says_what_it_wrote(folder: Path) -> None:
    done = flopwright("export", "plan.yaml", "--to", "a/bundle", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    files = {p.name: p.stat().st_size for p in (folder / "a" / "bundle").iterdir()}
    assert said["files"] == files
    plan = load_plan(folder / "a" / "bundle" / "plan.yaml")
    assert plan.predicted is not None
    assert plan.predicted.step_time_s == said["prediction"]["metrics"]["step_time_s"]


@pytest.mark.slow
def test_the_same_plan_gives_the_same_bytes(folder: Path) -> None:
    for name in ("one", "two"):
        done = flopwright("export", "plan.yaml", "--to", name, cwd=folder)
        assert done.returncode == 0
        assert "searching plans for fewer nodes" in done.stderr  # half a minute for large plans
    one = {p.name: p.read_bytes() for p in (folder / "one").iterdir()}
    assert one == {p.name: p.read_bytes() for p in (folder / "two").iterdir()}


@pytest.mark.slow
def test_bad_input_writes_nothing(folder: Path) -> None:
    (folder / "full").mkdir(exist_ok=True)
    (folder / "full" / "mine.txt").write_text("mine")
    sixteen = make_plan_file(load_scenario("first_steps"), ParallelPlan(dp_shard=16), "sixteen")
    (folder / "sixteen.yaml").write_text(dump_yaml(sixteen))
    cases = {
        ("export", "plan.yaml", "--to", "full"): "not empty",
        ("export", "absent.yaml", "--to", "new"): "cannot read the file",
        ("export", "sixteen.yaml", "--to", "new"): "must not exceed the cluster's GPUs",
        ("export", "plan.yaml", "--to", "new", "--calibration", "none"): "calibration",
        ("export", "plan.yaml", "--to", "plan.yaml/new"): "cannot be written",
    }
    for args, words in cases.items():
        done = flopwright(*args, cwd=folder)
        assert (done.returncode, words in done.stderr) == (2, True), (args, done.stderr)
        assert "Traceback" not in done.stderr
    assert [p.name for p in (folder / "full").iterdir()] == ["mine.txt"]
    assert not (folder / "new").exists()
    assert not list(folder.rglob(".export-*"))


@pytest.mark.slow
def test_the_bundle_starts_a_run_and_judges_it(folder: Path) -> None:
    pytest.importorskip("deepspeed")
    assert flopwright("export", "plan.yaml", "--to", "bundle", cwd=folder).returncode == 0
    bundle = folder / "bundle"
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHON": sys.executable}
    text = SCENARIO_CATALOG / "first_steps.txt"
    arguments = ["--text", str(text), "--tokenizer", "characters", "--steps", "25"]
    ran = subprocess.run(
        [bundle / "torchrun.sh", *arguments],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    steps = [json.loads(x) for x in (bundle / "run" / "steps.jsonl").read_text().splitlines()]
    assert len(steps) == 25

    def measure() -> tuple[int, str]:
        done = subprocess.run(
            [bundle / "measure.sh"],
            env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    code, said = measure()
    assert said.splitlines()[0].lower() == CHECK[code]  # how fast this machine is, is not judged
    assert "loss" in said
    assert "median step time" in said
    # a diverged run is stopped on any machine
    with (bundle / "run" / "steps.jsonl").open("a") as file:
        file.write(json.dumps(steps[-1] | {"step": 25, "loss": float("nan")}) + "\n")
    code, said = measure()
    assert code == 2
    assert "not finite at step 26" in said
