"""Long work of the dashboard: its answers are the functions' own, and it can be stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")

from flopwright.dashboards.jobs import Job, Jobs, key_of
from flopwright.dashboards.uploads import uploaded_loop, uploaded_round
from flopwright.errors import InputError
from flopwright.planner.result import SearchResult
from flopwright.planner.search import search
from flopwright.simulator.accuracy.named_stacks import scenario_calibration
from flopwright.simulator.calibration.machines import (
    load_machine,
    machine_names,
    save_machine,
)
from flopwright.spec.load import dump_yaml, load_cluster, load_scenario
from flopwright.spec.loop import load_loop_scenario
from flopwright.spec.rollout import load_rollout_scenario

K2 = "kimi_k2_pretrain_2048gpu_h800_bf16"
MINI = "kimi_k2_mini_2cpu_fp32"


@pytest.fixture
def pool() -> Iterator[Jobs]:
    made = Jobs(1)
    yield made
    made.close()


def ended(job: Job, seconds: float = 120) -> Job:
    deadline = time.monotonic() + seconds
    while job.is_going:
        assert time.monotonic() < deadline, job.text
        time.sleep(0.05)
    return job


def ask(pool: Jobs, scenario: Any, task: str = "search", **more: Any) -> Job:
    asked = {"scenario": scenario.to_data(), **more}
    return pool.ask(key_of(task, scenario), task, asked, SearchResult.model_validate, "me")


@pytest.mark.slow
def test_the_answer_is_that_of_the_search_and_is_kept(pool: Jobs) -> None:
    scenario = load_scenario(MINI)
    job = ended(ask(pool, scenario))
    assert job.state == "done", job.error
    assert job.answer == search(scenario, scenario_calibration, 10, refine=True)
    assert ask(pool, scenario) is job


@pytest.mark.slow
def test_work_that_is_stopped_makes_room_at_once(pool: Jobs) -> None:
    long = ask(pool, load_scenario(K2))
    while long.state == "waits" or not long.total:
        time.sleep(0.02)
    short = ask(pool, load_scenario(MINI))
    assert short.state == "waits"
    begin = time.monotonic()
    long.leave("me")
    assert long.state == "stopped"
    assert ended(short).state == "done"
    assert time.monotonic() - begin < 60
    assert long.answer is None


@pytest.mark.slow
def test_what_is_wrong_with_a_request_is_said_whole(pool: Jobs) -> None:
    scenario = load_scenario(MINI)
    workload = scenario.workload.model_copy(update={"global_batch_size": 1})
    job = ended(ask(pool, scenario.model_copy(update={"workload": workload})))
    assert job.state in {"failed", "done"}
    broken = ended(ask(pool, scenario, task="no such task"))
    assert broken.state == "failed"
    assert isinstance(broken.error, InputError)
    assert ended(ask(pool, scenario)).state == "done"


def test_work_that_nobody_looks_at_ends() -> None:
    job = Job("search", {}, SearchResult.model_validate)
    job.look("me")
    job.look("other")
    job.leave("me")
    assert job.is_wanted()
    job.leave("other")
    assert job.state == "stopped"
    assert not job.is_wanted()


def test_rounds_and_loops_can_be_uploaded() -> None:
    own = load_rollout_scenario("small_exponential_1gpu")
    assert uploaded_round("r.yaml", dump_yaml(own).encode()) == own
    loop = load_loop_scenario("kimi_k2_rl_256gpu_h800")
    assert uploaded_loop("l.yaml", dump_yaml(loop).encode()) == loop


@pytest.mark.parametrize(
    "content",
    [
        b"kind: rl_loop\nrollout: {}\ncluster: ../secret.yaml\n",
        b"kind: rl_loop\nrollout: {}\nserve: {served: ../../secret}\n",
        b"kind: rl_loop\nrollout: {}\ntrain: {model: /etc/passwd.yml}\n",
        b"kind: rl_loop\nrollout: {}\ncluster: {node: {gpu: /etc/secret}}\n",
    ],
)
def test_an_uploaded_loop_names_no_file_of_the_server(content: bytes) -> None:
    with pytest.raises(InputError, match="cannot refer to files"):
        uploaded_loop("l.yaml", content)


def test_a_probed_machine_is_chosen_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOPWRIGHT_HOME", str(tmp_path))
    assert machine_names() == []
    cluster = load_cluster("8_h100").model_copy(update={"name": "my box/1"})
    save_machine(cluster)
    assert machine_names() == ["my_box_1"]
    assert load_machine("my_box_1") == cluster
    with pytest.raises(InputError, match="no such machine"):
        load_machine("../calibrations/x")
    from flopwright.dashboards.view import View

    view = View(MINI, ("cluster=probed my_box_1", "cluster.num_nodes=1"))
    assert view.scenario().cluster == cluster
    assert view.command("plan")[:3] == ["flopwright", "plan", f"{MINI}.yaml"]
