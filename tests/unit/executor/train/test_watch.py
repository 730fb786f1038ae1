"""The watch ends a rank that hangs in communication, and no other."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.parallel.groups import Group
from flopwright.executor.train.watch import HungError, Watch

LIMIT_S = 0.2


class End:
    """Stands for the end of the process."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.came = threading.Event()

    def __call__(self, error: Exception) -> None:
        self.errors.append(error)
        self.came.set()


def group(*ranks: int) -> Group:
    return Group(ranks, 0, None)


def trial(timer: ActionTimer) -> Any:
    names = {"world": (0, 1, 2, 3), "dp_cp": (0, 1), "ep": (0, 2), "pp_forward": (0, 3)}
    return SimpleNamespace(
        timer=timer,
        current_step=7,
        entry=SimpleNamespace(name="a"),
        groups=SimpleNamespace(**{n: group(*ranks) for n, ranks in names.items()}),
        runner=SimpleNamespace(peers={"RECV_B(0,1)": 1}),
    )


def hang(name: str, cls: str) -> list[str]:
    """Returns what is said of a rank whose innermost action does not end."""
    timer, end = ActionTimer(0, torch.device("cpu")), End()
    watch = Watch(LIMIT_S, end)
    with watch.running(), watch.steps(trial(timer)):
        timer.start_step()
        with timer.action("OPTIM", "optimizer"), timer.action(name, cls):
            end.came.wait(10 * LIMIT_S)
    assert all(isinstance(error, HungError) for error in end.errors)
    return [str(error) for error in end.errors[:1]]


def test_communication_is_named_with_its_group() -> None:
    said = {
        ("clip_norm", "dp_comm"): "group world (ranks 0, 1, 2, 3)",
        ("REDUCE_GRAD", "dp_comm"): "group dp (ranks 0, 1)",
        ("ep_dispatch", "ep_comm"): "group ep (ranks 0, 2)",
        ("RECV_B(0,1)", "pp_comm"): "group pp (ranks 0, 3), for rank 3",
    }
    for (name, cls), where in said.items():
        assert hang(name, cls) == [
            f"has waited {LIMIT_S} s in {name} of step 7 of plan 'a', in {where}"
        ]


def test_compute_may_take_as_long_as_it_likes() -> None:
    assert hang("F(0,0)", "forward") == []


def test_a_rank_that_goes_on_is_left_alone() -> None:
    timer, end = ActionTimer(0, torch.device("cpu")), End()
    watch, pause = Watch(1.0, end), threading.Event()
    with watch.running(), watch.steps(trial(timer)):
        timer.start_step()
        for _ in range(13):
            with timer.action("REDUCE_GRAD", "dp_comm"):
                pause.wait(0.1)
    assert not end.errors


def test_waiting_outside_the_steps_is_watched_too() -> None:
    end = End()
    watch = Watch(LIMIT_S, end)
    with watch.running(), watch.waiting("the barrier", group(0, 1)):
        assert end.came.wait(50 * LIMIT_S)
    assert str(end.errors[0]) == (
        f"has waited {LIMIT_S} s in the barrier, in group world (ranks 0, 1)"
    )
