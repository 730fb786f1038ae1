"""A bound on when each stage is done, for schedules whose lists no short formula describes.

For each chunk four actions of its stage's list are anchors: the forward and the backward of
the first and of the last micro-batch. No anchor runs before

    across   the same micro-batch's anchor one chunk before it (for backwards: after it) is
             done, and has crossed the hop between them
    along    an anchor further up its own list has begun, and all work between has been done

and no stage is done before the work behind its last anchors is. Each bound is the length of
one path through the lowered list, so none exceeds the replay's longest path. The work before
and behind an anchor does not depend on the number of micro-batches once there are enough;
all between is counted by subtraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array
from flopwright.plan.lower import Unit, units
from flopwright.plan.schedules.actions import ActionKind
from flopwright.plan.schedules.placement import ScheduleName, chunk_table
from flopwright.plan.schedules.registry import stage_actions

Ints = NDArray[np.int64]

# Micro-batches, in units of pp, from which on no more change the work around the anchors.
PERIODS: Final = 4
_FORWARD, _BACKWARD = 0, 1
_F, _B, _W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class ListShape:
    """The anchors of all stages' lists, for a number of micro-batches.

    Work is counted by stage as (forwards, input gradients, weight gradients of each local
    chunk; pairs by local chunk of the forward and of the backward). Anchor a of a stage is
    that of side a // vpp (0 forward, 1 backward) of its local chunk a % vpp.

    Attributes:
        before: work before the first micro-batch's anchors, (pp, anchors, kinds).
        behind: work after the last micro-batch's anchors; first, last: the anchors' own.
        pairs: pairs of each stage, (pp, vpp * vpp); growth: how many more there are for each
            micro-batch beyond these.
        between: whether the first anchor a stands no later than the last anchor b,
            (pp, anchors a, anchors b).
        microbatches: what the lists were written out for.
    """

    before: Array
    behind: Array
    first: Array
    last: Array
    pairs: Array
    growth: Array
    between: NDArray[np.bool_]
    microbatches: int


@lru_cache(maxsize=512)
def list_shape(schedule: ScheduleName, pp: int, vpp: int, num_microbatches: int) -> ListShape:
    """Returns the anchors of the lists for num_microbatches."""
    rows = [
        _stage_shape(
            tuple(units(stage_actions(schedule, pp, vpp, stage, num_microbatches))), pp, vpp
        )
        for stage in range(pp)
    ]
    before, behind, first, last, pairs, between = (np.array(c) for c in zip(*rows, strict=True))
    growth = np.zeros_like(pairs)
    if num_microbatches == PERIODS * pp and pairs.any():
        fewer = list_shape(schedule, pp, vpp, num_microbatches - pp)
        growth = (pairs - fewer.pairs) / pp
    return ListShape(
        before=before,
        behind=behind,
        first=first,
        last=last,
        pairs=pairs,
        growth=growth,
        between=between,
        microbatches=num_microbatches,
    )


def _stage_shape(
    listed: Sequence[Unit], pp: int, vpp: int
) -> tuple[Array, Array, Array, Array, Array, NDArray[np.bool_]]:
    work = np.zeros((len(listed), 3 * vpp + vpp * vpp))
    first, last = [-1] * (2 * vpp), [-1] * (2 * vpp)
    rows, kinds = [], []
    for i, unit in enumerate(listed):
        for kind, chunk, *_ in unit:
            local = chunk // pp
            if kind is _W:
                rows.append(i)
                kinds.append(2 * vpp + local)
                continue
            anchor = local if kind is _F else vpp + local
            rows.append(i)
            kinds.append(anchor)
            if kind is _B:
                rows.append(i)
                kinds.append(2 * vpp + local)
            if first[anchor] < 0:
                first[anchor] = i
            last[anchor] = i
        if len(unit) == 2:
            forward, backward = (action.chunk // pp for action in unit)
            rows.append(i)
            kinds.append(3 * vpp + forward * vpp + backward)
    work[rows, kinds] = 1.0  # no unit has two of a kind
    upto = np.cumsum(work, axis=0)
    between = np.array(first)[:, None] <= np.array(last)[None, :]
    before, behind = upto[first] - work[first], upto[-1] - upto[last]
    return before, behind, work[first], work[last], upto[-1, 3 * vpp :], between


def list_end_seconds(
    schedule: ScheduleName,
    forward_s: Array,
    input_s: Array,
    weight_s: Array,
    saving_s: Array,
    hop_s: Array,
    num_microbatches: Ints,
    pp: int,
) -> Array:
    """Returns seconds from the step's beginning to each stage's last compute action, (pp, C).

    Args:
        forward_s, input_s, weight_s: by chunk, (chunks, C), the backward cut in its parts.
        saving_s: what a pair is shorter by than its halves apart, by stage and local chunk
            of the forward and of the backward, (pp, vpp, vpp, C).
        hop_s: from chunk c to c + 1, (chunks, C).
    """
    vpp = len(forward_s) // pp
    table = np.array(chunk_table(schedule, pp, vpp))  # (vpp, pp)
    by_stage = [np.swapaxes(x[table], 0, 1) for x in (forward_s, input_s, weight_s)]
    seconds = np.concatenate([*by_stage, -saving_s.reshape(pp, vpp * vpp, -1)], axis=1)
    out = np.zeros((pp, forward_s.shape[1]))
    listed = np.minimum(num_microbatches, PERIODS * pp)
    for m in np.unique(listed):
        here = listed == m
        shape = list_shape(schedule, pp, vpp, int(m))
        bound = _Bound(shape, table, seconds[:, :, here], hop_s[:, here])
        out[:, here] = bound.ends(num_microbatches[here] - m)
    return out


@dataclass(frozen=True, slots=True)
class _Bound:
    """The paths through one shape of lists.

    `seconds` are those of the counted kinds, (pp, kinds, C).
    """

    shape: ListShape
    table: Ints
    seconds: Array
    hop_s: Array

    def ends(self, more: Ints) -> Array:
        """Returns each stage's end; `more` micro-batches than were written out run, (C,)."""
        vpp = len(self.table)
        m = (self.shape.microbatches + more).astype(float)
        single, saved = self.seconds[:, : 3 * vpp], self.seconds[:, 3 * vpp :]
        pairs = self.shape.pairs[:, :, None] + self.shape.growth[:, :, None] * more
        total = m * single.sum(axis=1) + (pairs * saved).sum(axis=1)
        before = self.shape.before @ self.seconds
        behind = self.shape.behind @ self.seconds
        start = self._starts(before)
        ahead = start - before  # (pp, anchors, C)
        allowed = np.where(self.shape.between[..., None], ahead[:, :, None, :], -np.inf)
        along = total[:, None, :] + allowed.max(axis=1) - behind
        done = self._across(along, self.shape.last @ self.seconds)
        ends = np.maximum(ahead.max(axis=1) + total, (done + behind).max(axis=1))
        return np.asarray(ends)

    def _starts(self, before: Array) -> Array:
        """Returns when the first micro-batch's anchors begin at the earliest."""
        pp = self.table.shape[1]
        own = self.shape.first @ self.seconds
        start = np.zeros_like(before)
        came = np.zeros(before.shape[-1])
        for side, chunk, stage, anchor in self._way():
            if side == _FORWARD and chunk < pp:
                start[stage, anchor] = came
            else:  # the list's first action is the forward of the stage's first chunk
                waited = start[stage, 0] + before[stage, anchor]
                start[stage, anchor] = np.maximum(came, waited)
            came = start[stage, anchor] + own[stage, anchor] + self._hop(side, chunk)
        return start

    def _across(self, along: Array, own: Array) -> Array:
        """Returns when the last micro-batch's anchors are done at the earliest."""
        done = np.empty_like(along)
        came = np.zeros(along.shape[-1])
        for side, chunk, stage, anchor in self._way():
            done[stage, anchor] = np.maximum(came + own[stage, anchor], along[stage, anchor])
            came = done[stage, anchor] + self._hop(side, chunk)
        return done

    def _way(self) -> list[tuple[int, int, int, int]]:
        """Returns (side, chunk, stage, anchor) in the order a micro-batch passes them."""
        vpp, pp = self.table.shape
        places = {
            int(self.table[local, stage]): (stage, local)
            for local in range(vpp)
            for stage in range(pp)
        }
        down = [(_FORWARD, c, *places[c]) for c in range(pp * vpp)]
        up = [(_BACKWARD, c, s, vpp + local) for _, c, s, local in reversed(down)]
        return down + up

    def _hop(self, side: int, chunk: int) -> Array:
        """Returns the seconds from a chunk to the next one on the way; 0 from its last."""
        hop = chunk if side == _FORWARD else chunk - 1
        crosses = 0 <= hop < self.table.size - 1
        return np.asarray(self.hop_s[hop] if crosses else 0 * self.hop_s[0])
