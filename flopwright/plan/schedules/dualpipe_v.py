"""DualPipe-V: DeepSeek's DualPipe cut in half (arXiv 2412.19437, 3.2.1; its repo's dualpipev.py).

Two chunks a stage in a V. In the steady state a forward of one chunk and a backward of the
other run as one: the expert all-to-alls of each behind the other's compute. Such a pair is
two neighbouring actions with `overlaps` set, the forward first: neither begins before
both have their inputs, and both are done at the pair's end. Only the first and last
backwards are cut in two.
"""

from __future__ import annotations

from collections import Counter, deque

from flopwright.plan.schedules.actions import Action, ActionKind

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


class _List:
    """A stage's list in the making: numbers micro-batches, remembers weight gradients owed."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._count: Counter[tuple[bool, int]] = Counter()
        self._owed: deque[Action] = deque()

    def run(self, kind: ActionKind, chunk: int, *, overlaps: bool = False) -> None:
        """Appends the chunk's next forward or backward."""
        place = (kind is _F, chunk)
        action = Action(kind, chunk, self._count[place], overlaps=overlaps)
        self._count[place] += 1
        self.actions.append(action)
        if kind is _I:
            self._owed.append(action._replace(kind=_W))

    def pair(self, forward: int, backward: int) -> None:
        """Appends a forward and a backward that run as one."""
        self.run(_F, forward, overlaps=True)
        self.run(_B, backward, overlaps=True)

    def weight(self) -> None:
        """Appends the weight gradient that is owed longest, if any."""
        if self._owed:
            self.actions.append(self._owed.popleft())


def dualpipe_v(stage: int, pp: int, num_microbatches: int) -> tuple[Action, ...]:
    """Returns the compute actions of `stage`; num_microbatches is at least 2 pp."""
    down, up = stage, 2 * pp - 1 - stage
    after = pp - stage - 1  # stages between this one and the turn of the V
    out = _List()
    for _ in range(2 * after):
        out.run(_F, down)
    for _ in range(stage + 1):
        out.run(_F, down)
        out.run(_F, up)
    for _ in range(after):
        out.run(_I, up)
        out.weight()
        out.run(_F, up)
    for i in range(num_microbatches - 2 * pp + stage + 1):
        if i == 0 and after == 0:  # apart, the backward at the turn of the V begins sooner
            out.run(_F, down)
            out.run(_B, up)
        else:
            out.pair(down, up)
        out.pair(up, down)
    for _ in range(after):
        out.run(_B, up)
        out.pair(up, down)
    _drain(out, stage, down, up)
    for _ in range(after):
        out.weight()
        out.run(_I, down)
    for _ in range(stage + 1):
        out.weight()
    return tuple(out.actions)


def _drain(out: _List, stage: int, down: int, up: int) -> None:
    """Appends the last backwards of both chunks; from the middle on they put off weights."""
    half = (stage + 1) // 2
    for i in range(stage + 1):
        split = i > half or (i == half and stage % 2 == 1)
        out.run(_I if split else _B, up)
        split = i >= half
        out.run(_I if split else _B, down)
