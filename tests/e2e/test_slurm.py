"""The exported batch script and a real Slurm with pretend nodes (`.ci/slurm.sh`).

It takes the script of 256 nodes, refuses broken ones, and trains the mini K2 on two nodes, one
of which is lost. One file, so that no test sees a node down that another one took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.export.sbatch import sbatch_script
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file

ROOT = Path(__file__).parents[2]
STEPS = 60
EVERY = 4
PATIENCE_S = 300.0


class Slurm:
    """Slurm's programs, for the cluster that the environment names."""

    def __init__(self, config: str) -> None:
        bin_folder = Path(sys.executable).parent
        self._environment = os.environ | {
            "SLURM_CONF": config,
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    def __call__(self, *command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            command, cwd=cwd, env=self._environment, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout.strip()

    def takes(self, script: Path) -> tuple[bool, str]:
        """Returns whether `sbatch --test-only` takes a script, and its words."""
        done = subprocess.run(
            ["sbatch", "--test-only", str(script)],
            env=self._environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        return done.returncode == 0, done.stderr

    def cancel(self, number: str) -> None:
        """Ends a job that has not ended."""
        subprocess.run(["scancel", "--quiet", number], env=self._environment, check=False)

    def job(self, number: str) -> dict[str, str]:
        """Returns what Slurm says of a job, by field."""
        words = self("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)


@pytest.fixture
def slurm(need_service: Callable[[str, bool, str], None]) -> Slurm:
    config = os.environ.get("FLOPWRIGHT_TEST_SLURM_CONF", "")
    how = "apt-get install slurm-wlm munge, then . .ci/slurm.sh; start_slurm (as root)"
    need_service("Slurm", bool(config), how)
    return Slurm(config)


@pytest.fixture(scope="module")
def k2() -> str:
    scenario = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
    parallel = ParallelPlan(
        pp=16, ep=16, dp_shard=128, zero_stage=1, recompute="selective", fp8_activations=True
    )
    prediction, _ = predict(scenario, parallel, name="k2")
    return sbatch_script(make_plan_file(scenario, parallel, "k2"), prediction)


@pytest.mark.slow
def test_slurm_takes_the_script_of_2048_gpus(slurm: Slurm, k2: str, tmp_path: Path) -> None:
    assert "#SBATCH --nodes=256\n" in k2
    (tmp_path / "sbatch.sh").write_text(k2)
    accepted, words = slurm.takes(tmp_path / "sbatch.sh")
    assert accepted, words


MISTAKES = (
    ("--nodes=256", "--nodes=257"),
    ("--gpus-per-node=8", "--gpus-per-node=9"),
    ("--gpus-per-node=8", "--gpus-per-node=h200:8"),
    ("--ntasks-per-node=1", "--ntasks-per-node=1000"),
    ("--exclusive", "--exclusively"),
    ("--exclusive", "--exclusive\n#SBATCH --partition=moon"),
    ("--exclusive", "--exclusive\n#SBATCH --cpus-per-task=1000"),
    ("--nodes=256", "--nodez=256"),
    ("--mem=0", "--mem=64T"),
    ("--time=", "--time=soon"),
    ("--signal=B:TERM", "--signal=B:TERMINATE"),
    ("--open-mode=append", "--open-mode=beside"),
    ("--requeue", "--requeue-often"),
)


@pytest.mark.slow
def test_slurm_refuses_what_it_cannot_run(slurm: Slurm, k2: str, tmp_path: Path) -> None:
    missed = []
    for there, instead in MISTAKES:
        assert there in k2
        (tmp_path / "sbatch.sh").write_text(k2.replace(there, instead, 1))
        accepted, _ = slurm.takes(tmp_path / "sbatch.sh")
        if accepted:
            missed.append(instead)
    assert not missed


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The exported bundle of the mini K2, its experts on two nodes of one core each."""
    mini = load_scenario("kimi_k2_mini_2cpu_fp32")
    node = mini.cluster.node.model_copy(update={"gpus": 1, "cores": 1})
    cluster = mini.cluster.model_copy(
        update={"name": "two_nodes", "num_nodes": 2, "node": node, "network": node.link}
    )
    workload = mini.workload.model_copy(
        update={"seq_len": 64, "global_batch_size": 4, "total_tokens": 64 * 4 * STEPS}
    )
    scenario = mini.model_copy(update={"cluster": cluster, "workload": workload})
    plan = ParallelPlan(dp_shard=2, ep=2, micro_batch_size=2, data_parallel="none")
    (tmp_path / "plan.yaml").write_text(dump_yaml(make_plan_file(scenario, plan, "mini")))
    subprocess.run(
        [sys.executable, "-m", "flopwright", "export", "plan.yaml", "--to", "bundle"],
        cwd=tmp_path, check=True, timeout=300,
    )  # fmt: skip
    return tmp_path / "bundle"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Enough text for the mini's tokenizer."""
    folder = tmp_path / "text"
    folder.mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        (folder / page.name).write_bytes(page.read_bytes())
    return folder


def saved(bundle: Path) -> int:
    """Returns the last step that a checkpoint stands of."""
    found = [int(p.name.rpartition("-")[2]) for p in bundle.glob("run/checkpoint-*/step-*")]
    return max(found, default=0)


def waited(bundle: Path, what: str, until: Callable[[], bool]) -> None:
    """Waits until something holds; else fails with the job's output."""
    end = time.monotonic() + PATIENCE_S
    while not until():
        if time.monotonic() > end:
            output = "".join(p.read_text() for p in bundle.glob("slurm-*.out"))
            pytest.fail(f"no {what} after {PATIENCE_S:g} s:\n{output[-6000:]}")
        time.sleep(0.1)


@pytest.fixture
def job(slurm: Slurm, bundle: Path, text: Path) -> Iterator[str]:
    """The number of the mini run's job; whatever is left of it ends with the test."""
    arguments = ["--text", str(text), "--checkpoint-every", str(EVERY)]
    number = slurm("sbatch", "--parsable", "sbatch.sh", *arguments, cwd=bundle)
    try:
        yield number
    finally:
        slurm.cancel(number)


@pytest.mark.slow
def test_the_mini_run_survives_a_lost_node_and_the_end_of_its_time(
    slurm: Slurm, bundle: Path, job: str
) -> None:
    pytest.importorskip("deepspeed")

    def running(start: int) -> bool:
        found = slurm.job(job)
        return (found["JobState"], found["Restarts"]) == ("RUNNING", str(start))

    waited(bundle, "checkpoint", lambda: saved(bundle) >= EVERY)
    first = slurm.job(job)
    assert (first["JobState"], first["NumNodes"]) == ("RUNNING", "2")
    lost = slurm("scontrol", "show", "hostnames", first["NodeList"]).splitlines()[1]
    slurm("scontrol", "update", f"nodename={lost}", "state=down", "reason=planted")
    waited(bundle, "second start", lambda: running(1))
    before = saved(bundle)
    assert before < STEPS
    waited(bundle, "checkpoint of the second start", lambda: saved(bundle) > before)
    # as Slurm does before the end of --time
    slurm("scancel", "--batch", "--signal=TERM", job)
    waited(bundle, "third start", lambda: running(2))
    waited(bundle, "end", lambda: slurm.job(job)["JobState"] not in {"RUNNING", "COMPLETING"})
    output = "".join(p.read_text() for p in bundle.glob("slurm-*.out"))
    assert slurm.job(job)["JobState"] == "COMPLETED", output[-6000:]
    lines = (bundle / "run" / "steps.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [s["step"] for s in steps] == list(range(STEPS))
    assert sum(s["loss"] for s in steps[-10:]) < sum(s["loss"] for s in steps[:10])
    measured = json.loads((bundle / "run" / "measurement-mini.json").read_text())
    assert measured["losses"] == [s["loss"] for s in steps]
    assert saved(bundle) == STEPS
