"""Seconds of a collective: measured curves where the calibration has them, else formulas.

A network of CPU processes (gloo) does not follow ring formulas: its reduce-scatter is slower
than its all-reduce. So once a calibration has measured collectives, they price every
collective of the ranks they were measured between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from flopwright.errors import InputError
from flopwright.ops import Array, Collective
from flopwright.simulator.calibration.model import Calibration, CollectiveCurve
from flopwright.simulator.collectives.expert_exchange import ExpertCall, all_to_all_s
from flopwright.simulator.collectives.formulas import FORMULAS
from flopwright.simulator.collectives.net import net_of
from flopwright.simulator.collectives.topology import GroupShape
from flopwright.spec.cluster import ClusterSpec

# Which measured collective stands in for one that was not measured: same direction of data.
_STANDS_IN = {
    Collective.ALL_REDUCE: ("reduce_scatter", "all_gather"),
    Collective.ALL_GATHER: ("all_reduce", "broadcast"),
    Collective.REDUCE_SCATTER: ("all_reduce", "all_gather"),
    Collective.ALL_TO_ALL: ("all_gather", "all_reduce"),
    Collective.SEND_RECV: ("broadcast", "all_gather", "all_reduce"),
    Collective.BROADCAST: ("send_recv", "all_gather", "all_reduce"),
}


# What a probe calls the link between the GPUs of the node it ran on.
INTRA_NODE: Final = "intra_node"


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Seconds of one call by candidate, and what was assumed."""

    seconds: Array
    assumptions: tuple[str, ...] = ()


def collective_seconds(
    collective: Collective,
    nbytes: ArrayLike,
    group: GroupShape,
    cluster: ClusterSpec,
    calibration: Calibration,
    copies: int | None = None,
    *,
    call: ExpertCall = "combine",
    node_limit: Array | int | None = None,
    skew: ArrayLike = 1.0,
) -> CollectiveTimes:
    """Returns the seconds of one call; 0 in a group of one rank.

    Args:
        nbytes: payload as in CommTable, broadcasting over candidates.
        copies: for an expert exchange, the experts a token goes to (see wire_bytes).
        call: for an expert exchange, which of its two calls this is.
        node_limit: nodes a token may go to at most (node_limit_of).
        skew: for an exchange, bytes of the busiest rank over the mean, at least 1.

    Raises:
        InputError: payloads that are negative or not finite, a skew below 1, or a link that
            names curves that there are not.
    """
    n, g = np.broadcast_arrays(np.asarray(nbytes, float), group.size)
    if not np.isfinite(n).all() or (n < 0).any():
        raise InputError(f"bytes of {collective.name.lower()} must be finite and not negative")
    tail = np.asarray(skew, float)
    if not np.isfinite(tail).all() or (tail < 1).any():
        raise InputError("skew is the busiest rank over the mean: finite and at least 1")
    net = net_of(cluster)
    if collective is Collective.ALL_TO_ALL:
        seconds = all_to_all_s(n, group, net, copies, call=call, node_limit=node_limit, skew=tail)
    else:
        seconds = FORMULAS[collective](n, group, net)
    seconds = np.array(np.broadcast_to(seconds, n.shape))
    notes = _measured(seconds, collective, n, group, cluster, calibration)
    return CollectiveTimes(np.where(g > 1, seconds, 0.0), notes)


def _measured(
    seconds: Array,
    collective: Collective,
    n: Array,
    group: GroupShape,
    cluster: ClusterSpec,
    calibration: Calibration,
) -> tuple[str, ...]:
    """Puts measured curves in the place of formulas, where the crossed link was measured."""
    if not calibration.collectives:
        return ()
    notes: dict[str, None] = {}
    size, spans = (np.broadcast_to(a, n.shape) for a in (group.size, group.spans))
    for crosses, names in ((False, _near_names(cluster)), (True, _far_names(cluster))):
        curves = [c for c in calibration.collectives if c.link in names]
        here = (spans == crosses) & (size > 1)
        if not here.any():
            continue
        if not curves:
            notes[f"{names[0]} was not measured: formulas price it"] = None
            continue
        for ranks in np.unique(size[here]):
            curve, note = _pick(curves, collective, int(ranks))
            mine = here & (size == ranks)
            seconds[mine] = (curve.alpha_s + n / curve.bytes_per_s)[mine]
            if note:
                notes[note] = None
    return tuple(notes)


def _near_names(cluster: ClusterSpec) -> tuple[str, ...]:
    """Returns the names under which curves of the node's link may have been measured."""
    return (cluster.node.link.name, INTRA_NODE)


def _far_names(cluster: ClusterSpec) -> tuple[str, ...]:
    return (cluster.network.name,) if cluster.network else ()


def _pick(
    curves: Sequence[CollectiveCurve], collective: Collective, ranks: int
) -> tuple[CollectiveCurve, str]:
    """Returns the curve of one link that stands for a collective, and what that assumes."""
    name = collective.name.lower()
    for kind in (name, *_STANDS_IN[collective]):
        mine = [c for c in curves if c.collective == kind]
        if not mine:
            continue
        best = min(mine, key=lambda c: (abs(c.ranks - ranks), -c.ranks))
        notes = []
        if kind != name:
            notes.append(f"{name} is priced by the measured {kind}")
        if best.ranks != ranks:
            notes.append(f"{name} between {ranks} ranks is priced as between {best.ranks}")
        return best, "; ".join(notes)
    any_curve = max(curves, key=lambda c: c.ranks)
    return any_curve, f"{name} is priced by the measured {any_curve.collective}"
