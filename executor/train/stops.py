"""SIGTERM from whoever gave this run its machine: every rank ends after the step at hand.

A rank that is told to end names the step that it is about to begin as the last one of all, in
the store at which the ranks met; all look there before each step. No rank is further than that:
a step ends with a sum over all ranks (of the gradient norm), so that nobody can begin the step
after the named one before this rank has begun the named one, and has said so. No message of the
training itself is needed for it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from flopwright.executor.launch.request import STOP_NOW_FILE
from flopwright.executor.parallel.groups import Group, gather_bytes

_KEY: Final = "flopwright/last_step"
# What a shell reports of a process that SIGTERM ended.
EXIT_TERMINATED: Final = 128 + int(signal.SIGTERM)


class Store(Protocol):
    """What is needed of torch's stores."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets a key that is not there yet; returns what is there then."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Returns whether the keys are there."""
        ...

    def get(self, key: str) -> bytes:
        """Returns a key's value."""
        ...


@dataclass(frozen=True, slots=True)
class Order:
    """Who was told to end, and which step is the last.

    Attributes:
        last: number of the last step, counted over all plans since the launch began.
        rank: the rank that was told first; by: the signal's name.
    """

    last: int
    rank: int
    by: str


@dataclass(slots=True)
class Stops:
    """Whether the ranks of a launch are to make another step.

    Attributes:
        store: one that all ranks share.
        stop_file: rank 0 takes it as told when this file is there; the launcher writes it.
        order: once this rank knows of it.
    """

    store: Store
    rank: int
    stop_file: Path | None = None
    order: Order | None = None
    _begun: int = 0
    _told: str = ""
    _saved: threading.Event = field(default_factory=threading.Event)

    def before_step(self) -> bool:
        """Returns whether to make another step; every rank answers alike."""
        if self.order is None:
            self.order = self._look()
        if self.order is not None and self._begun > self.order.last:
            return False
        self._begun += 1
        return True

    def _look(self) -> Order | None:
        if not self._told and self.stop_file is not None and self.stop_file.exists():
            self._told = signal.Signals.SIGTERM.name
        if self._told:
            mine = json.dumps([self._begun, self.rank, self._told])
            return Order(*json.loads(self.store.compare_set(_KEY, "", mine)))
        if self.store.check([_KEY]):
            return Order(*json.loads(self.store.get(_KEY)))
        return None

    def saved(self) -> None:
        """Says that there is nothing left to be told: what the run goes on from stands."""
        self._saved.set()

    @contextmanager
    def listening(self, neighbours: Sequence[int], end: Callable[[int], Any]) -> Iterator[None]:
        """Takes SIGTERM inside; outside it ends the process, as ever.

        torchrun ends the ranks of a node with the same signal once one of them has failed:
        there is no step to be finished then.

        Args:
            neighbours: processes of the other ranks on this node.
            end: called with an exit code where a neighbour is gone; does not return.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # A thread reads what the signal writes: the training's own may stand in a collective.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        thread = threading.Thread(
            target=self._listen, args=(reader, tuple(neighbours), end), name="stops", daemon=True
        )
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGTERM, before)
            os.close(writer)  # the thread reads the end and is gone
            thread.join()

    def _listen(self, reader: int, neighbours: Sequence[int], end: Callable[[int], Any]) -> None:
        with os.fdopen(reader, "rb", buffering=0) as signals:
            while data := signals.read(1):
                if data[0] != signal.SIGTERM or self._saved.is_set():
                    continue
                if any(map(is_gone, neighbours)):
                    end(EXIT_TERMINATED)
                self._told = signal.Signals.SIGTERM.name


def make_stops(out_dir: Path) -> Stops:
    """Returns what ends the ranks that have just met."""
    rank = dist.get_rank()
    store: Any = dist.distributed_c10d._get_default_store()
    return Stops(store, rank, out_dir / STOP_NOW_FILE if rank == 0 else None)


def neighbours_of(world: Group, device: torch.device) -> tuple[int, ...]:
    """Returns the processes of the other ranks on this node; collective."""
    mine = [int(os.environ.get("GROUP_RANK", "0")), os.getpid()]
    found = [json.loads(d) for d in gather_bytes(json.dumps(mine).encode(), world, device)]
    return tuple(pid for node, pid in found if node == mine[0] and pid != mine[1])


def is_gone(pid: int) -> bool:
    """Returns whether a process has ended, whether or not its parent knows it yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:  # no such file system, or it has just ended
        return Path("/proc/self").exists()
    return status.rpartition(")")[2].split()[:1] == ["Z"]
