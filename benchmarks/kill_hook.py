"""Kills the process it runs in at a chosen place of a training; Python runs it at a rank's start.

KILL is "KIND:RANK:COUNT:DELAY": the rank dies (SIGKILL) when it comes by that place for the
COUNT-th time; of kind "rank" DELAY seconds after its COUNT-th step has begun, whatever it does
then. `data_worker` dies in the process that reads a rank's data ahead.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

DATA_WORKER: Final = "flopwright.executor.data.worker"


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dying(
    function: Callable[..., Any], count: int, die: Callable[..., Any] = _die
) -> Callable[..., Any]:
    """Returns the function, whose COUNT-th call calls `die` first."""
    left = [count]

    def replaced(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            die(*args, **options)
        return function(*args, **options)

    return replaced


def _in_checkpoint(kind: str, count: int) -> None:
    import flopwright.executor.checkpoint.save as save
    import flopwright.executor.checkpoint.storage as storage

    if kind == "half_file":
        whole = storage.save_file

        def half(tensors: Any, path: Any) -> None:
            whole(tensors, path)
            os.truncate(path, Path(path).stat().st_size // 2)
            _die()

        storage.save_file = _dying(whole, count, half)
    elif kind == "no_manifest":
        save.manifest_text = _dying(save.manifest_text, count)
    elif kind == "not_pruned":
        save.prune = _dying(save.prune, count)
    else:
        path = type(save.Path())
        rename = path.rename
        killing = _dying(rename, count)

        def renamed(self: Any, target: Any) -> Any:
            is_step = str(target).rsplit("/", 1)[-1].startswith("step-")
            return (killing if is_step else rename)(self, target)

        path.rename = renamed  # type: ignore[method-assign]


def _in_training(count: int, delay: float) -> None:
    import flopwright.executor.train.trial as trial

    def soon(*_: Any, **__: Any) -> None:
        timer = threading.Timer(delay, _die)
        timer.daemon = True
        timer.start()

    trial.Trial.run_step = _dying(trial.Trial.run_step, count, soon)  # type: ignore[method-assign]


def install() -> None:
    """Places the kill that the environment asks of this rank, if it asks for one."""
    kind, rank, count, delay = os.environ.get("KILL", ":::").split(":")
    if not kind or os.environ.get("RANK") != rank or not os.environ.get("TORCHELASTIC_RUN_ID"):
        return
    if (kind == "data_worker") != (DATA_WORKER in sys.orig_argv):
        return
    if kind == "data":
        import flopwright.executor.data.prepare as prepare

        prepare.split_documents = _dying(prepare.split_documents, int(count))
    elif kind == "data_worker":
        from flopwright.executor.data.order import Ordered

        read = _dying(Ordered.rank_batch, int(count))
        Ordered.rank_batch = read  # type: ignore[method-assign]
    elif kind == "rank":
        _in_training(int(count), float(delay))
    else:
        _in_checkpoint(kind, int(count))
