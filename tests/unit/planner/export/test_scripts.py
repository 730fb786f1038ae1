"""torchrun's own parser takes the command; the scripts are valid bash with the right fields."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.export.check import measure_script
from flopwright.planner.export.env import env_script, environment
from flopwright.planner.export.sbatch import sbatch_options, sbatch_script
from flopwright.planner.export.target import placement, slug
from flopwright.planner.export.torchrun import (
    command,
    program_arguments,
    torchrun_arguments,
    torchrun_script,
)
from flopwright.report.metrics import Prediction
from flopwright.spec.load import make_plan_file
from flopwright.spec.scenario import Scenario

# A stand-in for Slurm's program: two nodes, of which Slurm knows the address.
SCONTROL = """
case "$1" in
  show) printf 'gpu001\\ngpu002\\n' ;;
  *) echo "NodeName=$4 CPUTot=8 NodeAddr=10.0.0.7 NodeHostName=n7 Version=22.05" ;;
esac
"""
HOSTILE = 'x"; touch pwned #\n$(touch pwned) `touch pwned`'


def bash_n(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=30)


def bash_run(script: str, folder: Path, *args: str, **env: str) -> str:
    done = subprocess.run(
        ["bash", "-s", "--", *args],
        input=script,
        text=True,
        check=True,
        timeout=30,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", **env},
        capture_output=True,
    )
    return done.stdout


@pytest.mark.parametrize("axes", [{"dp_shard": 4}, {"dp_shard": 128, "pp": 16}])
def test_torchrun_takes_the_arguments(
    axes: dict[str, int],
    make: Callable[..., PlanFile],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = pytest.importorskip("torch.distributed.run")
    monkeypatch.chdir(tmp_path)  # torchrun's parser makes the folder of the logs
    plan = make(**axes)
    arguments = [*torchrun_arguments(plan, endpoint="host0:29500"), *program_arguments()]
    parsed = run.get_args_parser().parse_args(arguments)
    config, _, program = run.config_from_args(parsed)
    where = placement(plan)
    assert config.min_nodes == config.max_nodes == where.nodes
    assert config.nproc_per_node * where.nodes == plan.parallel.world_size
    assert parsed.standalone == (where.nodes == 1)
    if where.nodes > 1:
        assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "host0:29500")
    assert program[-len(program_arguments()) :] == list(program_arguments())


@pytest.mark.parametrize("axes", [{"dp_shard": 4}, {"dp_shard": 128, "pp": 16}])
def test_the_launcher_starts_the_same_program(
    axes: dict[str, int], make: Callable[..., PlanFile]
) -> None:
    """Where output goes is the bundle's own choice; all else equals `flopwright run`."""
    from flopwright.executor.launch import commands

    plan = make(**axes)
    where = placement(plan)
    theirs = commands.torchrun_arguments(
        "request.json",
        nproc_per_node=where.ranks_per_node,
        nnodes=where.nodes,
        rendezvous="host0:29500" if where.nodes > 1 else None,
    )
    output = ("--log-dir", "--tee", "--local-ranks-filter")
    ours = torchrun_arguments(plan, endpoint="host0:29500")
    assert tuple(a for a in ours if not a.startswith(output)) == theirs[:-1]


def test_the_program_takes_its_arguments(make: Callable[..., PlanFile]) -> None:
    start = pytest.importorskip("flopwright.executor.train.start")
    parsed = start.parse_arguments([*program_arguments(), "--steps", "5", "--text", "books"])
    assert [str(p) for p in parsed.plan] == ["plan.yaml"]
    assert (str(parsed.out), parsed.steps) == ("run", 5)


def test_command_and_script_start_the_same_program(make: Callable[..., PlanFile]) -> None:
    plan = make(dp_shard=4)
    script = torchrun_script(plan).replace("\\\n", " ")
    start = next(line for line in script.splitlines() if line.startswith("exec torchrun"))
    assert shlex.split(start) == ["exec", *shlex.split(command(plan)), "$@"]


def test_torchrun_script_hands_over_what_it_is_given(
    make: Callable[..., PlanFile], tmp_path: Path
) -> None:
    """Run with a stand-in for torchrun that prints its arguments."""
    plan = make(dp_shard=128, pp=16)
    (tmp_path / "ENV.sh").write_text(env_script(plan))
    fake = tmp_path / "bin" / "torchrun"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    (tmp_path / "torchrun.sh").write_text(torchrun_script(plan))
    out = bash_run(
        "exec bash ./torchrun.sh --text 'a b'",
        tmp_path,
        PATH=f"{fake.parent}:/usr/bin:/bin",
        RDZV_ENDPOINT="node7:29500",
    ).splitlines()
    assert out == [
        *torchrun_arguments(plan, endpoint="node7:29500"),
        *program_arguments(),
        "--text",
        "a b",
    ]


def test_several_nodes_without_a_meeting_place_are_refused(
    make: Callable[..., PlanFile], tmp_path: Path
) -> None:
    plan = make(dp_shard=128, pp=16)
    script = tmp_path / "torchrun.sh"
    script.write_text(torchrun_script(plan))
    done = subprocess.run(
        ["bash", script],
        text=True, check=False, timeout=30, capture_output=True, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 64
    assert "256 nodes" in done.stderr
    assert "RDZV_ENDPOINT=FIRST_NODE:29500" in done.stderr
    assert "RDZV_ENDPOINT" not in torchrun_script(make(dp_shard=4))


def test_measuring_without_the_environment_is_no_verdict(
    make: Callable[..., PlanFile], tmp_path: Path
) -> None:
    script = tmp_path / "measure.sh"
    script.write_text(measure_script(make(dp_shard=4)))
    bare = tmp_path / "python-without-flopwright"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    for python in (bare, tmp_path / "absent"):
        done = subprocess.run(
            ["bash", script], text=True, check=False, timeout=60, capture_output=True,
            env={"PATH": "/usr/bin:/bin", "PYTHON": str(python)},
        )  # fmt: skip
        assert done.returncode == 64, done.stderr
        assert "cannot import flopwright" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_sbatch_fields(k2: PlanFile, prediction: Prediction) -> None:
    script = sbatch_script(k2, prediction)
    bash_n(script)
    lines = script.splitlines()
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in lines
        if line.startswith("#SBATCH")
    )
    assert options["nodes"] == "256"
    assert options["ntasks-per-node"] == "1"
    assert options["gpus-per-node"] == "8"
    # the upper end of the predicted step time, 16 s, over all steps, in whole hours
    hours, rest = options["time"].split(":", 1)
    run_h = 16 * k2.scenario.workload.num_steps / 3600
    assert (run_h <= int(hours) < run_h + 1, rest) == (True, "00:00")
    # told in time to end four steps and save, and started again where Slurm ends it
    assert (options["signal"], options["open-mode"]) == ("B:TERM@240", "append")
    assert "requeue" in options
    # Slurm stops reading options at the first command
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(not line.startswith("#SBATCH") for line in lines[first_command:])
    assert len([line for line in lines if line.startswith("#SBATCH")]) == len(
        sbatch_options(k2, prediction)
    )


def test_sbatch_starts_one_torchrun_a_node(
    k2: PlanFile, prediction: Prediction, tmp_path: Path
) -> None:
    """Run with stand-ins for Slurm's programs: the rendezvous is the first node."""
    (tmp_path / "ENV.sh").write_text(env_script(k2))
    for name, body in {
        "srun": 'printf "%s\\n" "$@"',
        "scontrol": SCONTROL,
    }.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    out = bash_run(
        sbatch_script(k2, prediction),
        tmp_path,
        PATH=f"{tmp_path}:/usr/bin:/bin",
        SLURM_SUBMIT_DIR=str(tmp_path),
        SLURM_JOB_NODELIST="gpu[001-002]",
        SLURM_NNODES="256",
        SLURM_JOB_ID="77",
    ).splitlines()
    cores = k2.scenario.cluster.node.cores
    kept = [] if cores is None else [f"--cpus-per-task={cores}"]
    assert out[: 2 + len(kept)] == ["--kill-on-bad-exit=1", *kept, "torchrun"]
    assert {"--nnodes=256", "--nproc-per-node=8", "--rdzv-id=77"} <= set(out)
    # by the address that Slurm itself uses, on a port of this job's
    assert "--rdzv-endpoint=10.0.0.7:29577" in out
    # half an hour at 12.5 s a step
    assert out[-3:] == ["--checkpoint-every", "144", "--resume"]


def test_cpu_plans_ask_for_no_gpus(scenario: Scenario, prediction: Prediction) -> None:
    node = scenario.cluster.node
    gpu = node.gpu.model_copy(update={"kind": "cpu"})
    cluster = scenario.cluster.model_copy(
        update={"node": node.model_copy(update={"gpu": gpu, "cores": 2})}
    )
    plan = make_plan_file(
        scenario.model_copy(update={"cluster": cluster}), ParallelPlan(dp_shard=2), "mini"
    )
    options = sbatch_options(plan, prediction)
    assert not any(o.startswith("--gpus") for o in options)
    assert "--cpus-per-task=2" in options
    variables = {v.name: v.value for v in environment(plan)}
    assert variables["OMP_NUM_THREADS"] == "1"
    assert not any(name.startswith(("NCCL", "CUDA")) for name in variables)


def test_every_variable_has_a_reason_and_can_be_overridden(
    make: Callable[..., PlanFile], tmp_path: Path
) -> None:
    plan = make(dp_shard=64, tp=8)
    script = env_script(plan)
    for variable in environment(plan):
        assert len(variable.reason) > 20
        said = bash_run(f"{script}\necho ${variable.name}", tmp_path)
        assert said.strip() == variable.value
    kept = bash_run(f"{script}\necho $NCCL_DEBUG", tmp_path, NCCL_DEBUG="INFO")
    assert kept.strip() == "INFO"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in script
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in env_script(make(dp_shard=64))


@pytest.mark.parametrize(
    ("world", "gpus", "nodes"), [(4, 8, 1), (8, 8, 1), (16, 8, 2), (12, 8, 2), (7, 4, 7)]
)
def test_placement_holds_every_rank(world: int, gpus: int, nodes: int, scenario: Scenario) -> None:
    node = scenario.cluster.node.model_copy(update={"gpus": gpus})
    cluster = scenario.cluster.model_copy(update={"node": node})
    plan = make_plan_file(
        scenario.model_copy(update={"cluster": cluster}), ParallelPlan(dp_shard=world), "p"
    )
    where = placement(plan)
    assert where.nodes * where.ranks_per_node == world
    assert where.ranks_per_node <= gpus
    assert where.nodes == nodes


def test_a_hostile_name_stays_a_name(
    make: Callable[..., PlanFile], prediction: Prediction, tmp_path: Path
) -> None:
    plan = make(name=HOSTILE, dp_shard=4)
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", slug(HOSTILE))
    for script in (
        torchrun_script(plan),
        sbatch_script(plan, prediction),
        env_script(plan),
        measure_script(plan),
    ):
        bash_n(script)
    bash_run(env_script(plan), tmp_path)
    assert shlex.split(command(plan))[0] == "torchrun"
    assert not list(tmp_path.iterdir())
