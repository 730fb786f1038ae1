"""A run that failed is started again, and under a smaller plan once its ranks are lost."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flopwright.errors import InputError
from flopwright.executor.checkpoint.manifest import step_folder
from flopwright.executor.launch.checks import LaunchOptions
from flopwright.executor.launch.local import RunFailedError
from flopwright.executor.launch.machine import Machine
from flopwright.executor.launch.request import RunEntry, RunRequest, write_json
from flopwright.executor.launch.supervisor import Supervision, cost_of, given_fallbacks
from flopwright.plan.file import PlanFile, PredictedStep
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_plan, load_scenario, make_plan_file

SCENARIO = load_scenario("kimi_k2_mini_2cpu_fp32")
STEPS = 100


def plan(ranks: int, step_s: float | None = None, **changes: Any) -> PlanFile:
    workload = SCENARIO.workload.model_copy(update=changes)
    scenario = SCENARIO.model_copy(update={"workload": workload})
    predicted = step_s and PredictedStep(
        step_time=f"{step_s} s", interval80_low=f"{step_s} s", interval80_high=f"{step_s} s",
        peak_memory="1 GiB",
        provenance="analytic",
    )  # fmt: skip
    parallel = ParallelPlan(dp_shard=ranks)
    return make_plan_file(scenario, parallel, f"on-{ranks}", predicted or None)


@dataclass
class Launches:
    """Stands for `launch`: each start ends as its script says, after a checkpoint."""

    out: Path
    ends: list[tuple[int, Exception | None]]
    seen: list[tuple[int, LaunchOptions]] = field(default_factory=list)

    def __call__(self, plans: Any, out: Any, options: LaunchOptions, show: Any) -> Any:
        file = load_plan(plans[0])
        step, error = self.ends[len(self.seen)]
        self.seen.append((file.parallel.world_size, options))
        self.out.mkdir(exist_ok=True)
        entry = RunEntry(name="x", plan=file)
        request = RunRequest(entries=(entry,), device="cpu", steps=STEPS)
        write_json(self.out / "request.json", request.to_data())
        if step:
            folder = self.out / "checkpoint-x" / step_folder(step)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "manifest.json").touch()
        if error is not None:
            raise error
        return "result"


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Returns what supervises launches of a plan of four ranks; (result, launches, said)."""

    def run(*ends: tuple[int, Exception | None], nproc: int | None = 4, **how: Any) -> Any:
        path, said = tmp_path / "plan.yaml", list[str]()
        path.write_text(dump_yaml(plan(4, 0.5)))
        launches = Launches(tmp_path / "out", list(ends))
        supervise = Supervision(
            launch_one=launches, pause=lambda _: None,
            **{"max_restarts": 2, "machine": lambda: Machine(cores=4, gpus=0), **how},
        )  # fmt: skip
        options = LaunchOptions(nproc=nproc, checkpoint_every=10)
        try:
            result = supervise(
                [path], tmp_path / "out", options, lambda e: said.append(e["phase"])
            )
        except RunFailedError as error:
            result = error
        return result, launches, said

    return run


KILLED = RunFailedError("rank 3 was killed\nmore of it")


def test_a_run_goes_on_from_its_last_checkpoint(start: Any, tmp_path: Path) -> None:
    result, launches, said = start((20, KILLED), (40, None))
    assert result == "result"
    assert [options.resume for _, options in launches.seen] == [False, True]
    assert said == [
        "rank 3 was killed. Starting again from the checkpoint of 20 steps (restart 1 of 2 "
        "without a new checkpoint)"
    ]
    (line,) = map(json.loads, (tmp_path / "out" / "restarts.jsonl").read_text().splitlines())
    assert (line["cause"], line["from_step"]) == ("rank 3 was killed", 20)


def test_a_new_checkpoint_forgives_what_was_before(start: Any) -> None:
    failing = [(step, KILLED) for step in (0, 0, 10, 10, 20, 20)]
    result, launches, _ = start(*failing, (30, None))
    assert result == "result"
    assert len(launches.seen) == 7


def test_without_progress_and_without_a_smaller_plan_it_ends(start: Any) -> None:
    result, launches, _ = start(*[(10, KILLED)] * 9)
    assert len(launches.seen) == 3
    assert isinstance(result, RunFailedError)
    assert str(result) == (
        "rank 3 was killed\nmore of it\nit failed 3 times without a new checkpoint: ranks of "
        "plan 'on-4' count as lost, and no plan for fewer ranks is left"
    )


def test_lost_ranks_are_replaced_by_the_largest_plan_that_is_left(
    start: Any, tmp_path: Path
) -> None:
    spare = [plan(1, 1.5), plan(2, 0.8)]
    result, launches, said = start(
        *[(20, KILLED)] * 3, (30, KILLED), (30, None), fallbacks=lambda _: spare
    )
    assert result == "result"
    assert [ranks for ranks, _ in launches.seen] == [4, 4, 4, 2, 2]
    assert [options.nproc for _, options in launches.seen] == [4, 4, 4, 2, 2]
    assert said[2] == (
        "rank 3 was killed. it failed 3 times without a new checkpoint: ranks of plan 'on-4' "
        "count as lost. Going on from the checkpoint of 20 steps under 'on-2' on 2 ranks of 4, "
        "the same global batch; predicted step 800 ms instead of 500 ms (60 % longer): 64 s for "
        "the 80 steps left instead of 40 s"
    )
    line = json.loads((tmp_path / "out" / "restarts.jsonl").read_text().splitlines()[2])
    assert (line["ranks"], line["step_time_s"], line["step_time_before_s"]) == (2, 0.8, 0.5)
    # its own global batch, whatever the ranks
    assert {load_plan(p).scenario.workload.global_batch_size
            for p in (tmp_path / "plan.yaml", tmp_path / "out" / "fallback-2.yaml")} == {
        SCENARIO.workload.global_batch_size}  # fmt: skip


def test_a_machine_with_fewer_gpus_is_not_tried_again(start: Any) -> None:
    result, launches, said = start(
        (20, KILLED), (30, None), nproc=None, fallbacks=lambda _: [plan(2, 0.8), plan(3, 0.7)],
        machine=lambda: Machine(cores=64, gpus=2),
    )  # fmt: skip
    assert result == "result"
    assert [ranks for ranks, _ in launches.seen] == [4, 2]
    assert "this machine has 2 CUDA GPUs left and plan 'on-4' needs 4" in said[0]


def test_wrong_input_is_not_tried_again(start: Any) -> None:
    with pytest.raises(InputError, match="no room"):
        start((20, InputError("no room")))


def test_a_plan_for_something_else_is_no_fallback(start: Any, tmp_path: Path) -> None:
    other = plan(2, 0.8, seq_len=SCENARIO.workload.seq_len * 2)
    with pytest.raises(InputError, match="another workload than 'on-4'"):
        start(*[(20, KILLED)] * 3, fallbacks=lambda _: [other])
    for name, bad in (("other", other), ("large", plan(4))):
        (tmp_path / f"{name}.yaml").write_text(dump_yaml(bad))
        with pytest.raises(InputError):
            given_fallbacks([tmp_path / f"{name}.yaml"], plan(4))
    (tmp_path / "fine.yaml").write_text(dump_yaml(plan(2)))
    assert given_fallbacks([tmp_path / "fine.yaml"], plan(4))(plan(4)) == (plan(2),)


def test_what_is_not_predicted_is_said_to_be_so() -> None:
    assert cost_of(plan(4), plan(2, 1.0), 10).text.endswith("not predicted in the plan files")
    assert "instead of 3 s" in cost_of(plan(4), plan(2), 10, lambda _: 3.0).text
