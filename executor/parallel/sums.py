"""The finished sums of attention residuals that a rank keeps from one of its chunks to the next.

A sum travels to a stage once (plan/hops.py): its later chunks read it where it stands. Backward
the gradients that they ask for wait here for the backward pass of the chunk before them on this
rank, which begins with them beside the gradient of what it sent on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flopwright.executor.parallel.entry import entered

Key = tuple[int, int]  # chunk, micro-batch


@dataclass(slots=True)
class Sums:
    """Finished sums by (chunk, micro-batch).

    Attributes:
        held: by chunk of the pipeline, how many its stage has before it runs.
        chunks: this rank's, in model order.
    """

    held: Sequence[int]
    chunks: Sequence[int]
    _later: dict[int, int] = field(init=False)
    _earlier: dict[int, int] = field(init=False)
    _kept: dict[Key, tuple[Tensor, ...]] = field(default_factory=dict)
    _edges: dict[Key, tuple[GradientEdge, ...]] = field(default_factory=dict)
    _gradients: dict[Key, dict[int, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pairs = list(zip(self.chunks, self.chunks[1:], strict=False))
        self._later = dict(pairs)
        self._earlier = {later: earlier for earlier, later in pairs}

    def enter(self, key: Key) -> tuple[Tensor, ...]:
        """Returns the sums that a chunk reads of what was kept, each the beginning of a graph."""
        chunk, microbatch = key
        if chunk not in self._earlier:
            return ()
        mine = self._gradients.setdefault((self._earlier[chunk], microbatch), {})
        kept = self._kept.pop(key)
        return tuple(
            entered(t, lambda g, i=i: mine.update({i: g}))  # type: ignore[misc]
            for i, t in enumerate(kept)
        )

    def keep(self, key: Key, finished: Iterable[Tensor]) -> None:
        """Keeps all sums that were finished before and in a chunk for this rank's next one."""
        chunk, microbatch = key
        if chunk not in self._later:
            return
        sums = tuple(finished)
        self._kept[self._later[chunk], microbatch] = tuple(t.detach() for t in sums)
        self._edges[key] = tuple(map(get_gradient_edge, sums))

    def roots(self, key: Key) -> list[tuple[GradientEdge, Tensor]]:
        """Returns where a chunk's backward begins beside its result, with the gradients there."""
        gradients = self._gradients.pop(key, {})
        edges = self._edges.pop(key, ())
        return [(edge, gradients[i]) for i, edge in enumerate(edges) if i in gradients]

    def __bool__(self) -> bool:
        """Whether anything still waits."""
        return bool(self._kept or self._edges or self._gradients)
