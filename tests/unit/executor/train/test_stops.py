"""All ranks end after the same step, whoever is told when."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from flopwright.executor.train.stops import EXIT_TERMINATED, Stops, is_gone

RANKS, STEPS = 4, 40


def run_ranks(told: dict[int, int], seed: int) -> list[int]:
    """Returns how many steps each rank makes; `told` names in which step ranks are told."""
    store, barrier = dist.HashStore(), threading.Barrier(RANKS)
    made = [0] * RANKS

    def rank(number: int) -> None:
        rng = random.Random(seed * RANKS + number)
        stops = Stops(store, number)
        for step in range(STEPS):
            time.sleep(rng.uniform(0, 0.002))
            if not stops.before_step():
                return
            made[number] += 1
            if told.get(number) == step:
                stops._told = "SIGTERM"
            time.sleep(rng.uniform(0, 0.002))
            barrier.wait(30)  # the sum of the gradient norm

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return made


@pytest.mark.parametrize("seed", range(6))
def test_everyone_makes_the_same_steps(seed: int) -> None:
    rng = random.Random(seed)
    told = {rng.randrange(RANKS): rng.randint(3, 20) for _ in range(seed % 3 + 1)}
    made = run_ranks(told, seed)
    assert made == [min(told.values()) + 2] * RANKS  # that step, and one more


def test_nobody_is_told_and_all_steps_are_made() -> None:
    assert run_ranks({}, 0) == [STEPS] * RANKS


def test_a_file_tells_the_rank_that_looks_for_it(tmp_path: Path) -> None:
    stops = Stops(dist.HashStore(), 0, tmp_path / "stop-now")
    assert stops.before_step()
    (tmp_path / "stop-now").touch()
    assert stops.before_step()
    assert not stops.before_step()
    assert stops.order is not None
    assert (stops.order.last, stops.order.rank, stops.order.by) == (1, 0, "SIGTERM")


def wait_for(something: object) -> None:
    until = time.monotonic() + 30
    while not something() and time.monotonic() < until:  # type: ignore[operator]
        time.sleep(0.01)
    assert something()  # type: ignore[operator]


def test_the_signal_is_taken_while_the_training_does_something_else() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stops = Stops(dist.HashStore(), 3)
    with stops.listening((os.getpid(),), lambda _: None):
        assert stops.before_step()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: stops._told)
    assert signal.getsignal(signal.SIGTERM) is before
    assert stops.before_step()
    assert not stops.before_step()
    assert stops.order is not None
    assert stops.order.rank == 3


def test_where_a_neighbour_is_gone_the_signal_ends_the_rank_at_once() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    ended: list[int] = []
    stops = Stops(dist.HashStore(), 0)
    with stops.listening((gone.pid,), ended.append):
        wait_for(lambda: is_gone(gone.pid))  # not yet waited for by its parent
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: ended)
    gone.wait()
    assert ended == [EXIT_TERMINATED]
    assert is_gone(gone.pid)
    assert not is_gone(os.getpid())


def test_once_all_is_saved_the_signal_changes_nothing() -> None:
    ended: list[int] = []
    stops = Stops(dist.HashStore(), 0)
    stops.saved()
    with stops.listening((2**22 + 1,), ended.append):  # no process has this number
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    assert not ended
    assert stops.before_step()
