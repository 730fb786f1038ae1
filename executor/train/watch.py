"""Ends a rank that waits for another one for too long, and says where it stood.

A collective or a receive whose partner is gone, or stands elsewhere in its list, waits
without a word. A thread looks at the action at work; if it is communication and does not
end within the limit, the rank says which group and action it hangs in, and ends: torchrun
then ends the others.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flopwright.executor.parallel.groups import Group, Groups
from flopwright.executor.train.failure import report_failure
from flopwright.executor.train.trial import Trial

# Which group an action's partners are in, by time class.
_GROUPS: Final[dict[str, str]] = {
    "tp_comm": "tp",
    "cp_comm": "cp",
    "ep_comm": "ep",
    "pp_comm": "pp_forward",
    "dp_comm": "dp_cp",
}
_OVER_ALL: Final = frozenset({"clip_norm"})
_LOOKS: Final = 20  # at the action, within the limit


class HungError(Exception):
    """A rank waited for others longer than the limit."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Where a rank stands: equal for as long as it does not go on."""

    number: int
    what: str
    where: str


@dataclass(slots=True)
class Watch:
    """Looks after this rank while something is watched.

    Attributes:
        limit_s: how long a rank may wait for others.
        end: called with the error once it has waited longer; does not return.
    """

    limit_s: float
    end: Callable[[Exception], Any]
    _look: Callable[[], Waiting | None] | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watches inside, whatever `steps` and `waiting` name."""
        thread = threading.Thread(target=self._run, name="watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    @contextmanager
    def steps(self, trial: Trial) -> Iterator[None]:
        """Watches the actions of a plan's steps."""
        with self._looking(lambda: _standing(trial)):
            yield

    @contextmanager
    def waiting(self, what: str, group: Group) -> Iterator[None]:
        """Watches what is done together outside the steps."""
        here = Waiting(0, what, _where("world", group))
        with self._looking(lambda: here):
            yield

    @contextmanager
    def _looking(self, look: Callable[[], Waiting | None]) -> Iterator[None]:
        before, self._look = self._look, look
        try:
            yield
        finally:
            self._look = before

    def _run(self) -> None:
        last: tuple[Any, Waiting | None] = (None, None)
        since = time.monotonic()
        while not self._stop.wait(self.limit_s / _LOOKS):
            look = self._look
            now = (look, look() if look is not None else None)
            if now != last or now[1] is None:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > self.limit_s:
                self.end(HungError(_message(now[1], self.limit_s)))


def _standing(trial: Trial) -> Waiting | None:
    """Returns the communication at work; None while the rank computes."""
    found = trial.timer.unfinished()
    if found is None or found[2] not in _GROUPS:
        return None
    number, name, cls = found
    what = f"{name} of step {trial.current_step} of plan '{trial.entry.name}'"
    peer = trial.runner.peers.get(name)
    return Waiting(number, what, _place(trial.groups, name, cls, peer))


def _place(groups: Groups, name: str, cls: str, peer: int | None) -> str:
    if name in _OVER_ALL:
        return _where("world", groups.world)
    group = getattr(groups, _GROUPS[cls])
    where = _where(cls.removesuffix("_comm"), group)
    return where if peer is None else f"{where}, for rank {group.ranks[peer]}"


def _where(name: str, group: Group) -> str:
    ranks = ", ".join(map(str, group.ranks[:16])) + (", ..." if group.size > 16 else "")
    return f"group {name} (ranks {ranks})"


def _message(waiting: Waiting, limit_s: float) -> str:
    return f"has waited {limit_s:g} s in {waiting.what}, in {waiting.where}"


def end_process(out_dir: Path) -> Callable[[Exception], None]:
    """Returns what ends this process at once after telling why."""

    def end(error: Exception) -> None:
        os._exit(report_failure(out_dir, error))

    return end


def left_alone(trials: Sequence[Trial]) -> Callable[[int], None]:
    """Returns what ends this process at once, with where it was, once another one is gone.

    torchrun knows which, and why: that one could no longer say it.
    """

    def end(exit_code: int) -> None:
        at = ", ".join(f"step {t.current_step} of plan '{t.entry.name}'" for t in trials)
        rank = os.environ.get("RANK", "0")
        sys.stderr.write(f"rank {rank} ends because another one is gone; it was in {at}\n")
        sys.stderr.flush()
        os._exit(exit_code)

    return end
