"""Seconds of a collective: measured curves where the calibration has them, else formulas.

A network of CPU processes (gloo) does not follow ring formulas: its reduce-scatter is slower
than its all-reduce. So once a calibration has measured collectives, they price every
collective of the ranks they were measured between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flopwright.errors import InputError
from flopwright.ops import Array, Collective
from flopwright.simulator.calibration.model import Calibration, CollectiveCurve
from flopwright.simulator.collectives.formulas import FORMULAS, all_to_all_s
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
) -> CollectiveTimes:
    """Returns the seconds of one call; 0 in a group of one rank.

    Args:
        nbytes: payload as in CommTable, broadcasting over candidates.
        copies: for an expert exchange, the experts a token goes to (see all_to_all_s).

    Raises:
        InputError: payloads that are negative or not finite.
    """
    n, g = np.broadcast_arrays(np.asarray(nbytes, float), group.size)
    if not np.isfinite(n).all() or (n < 0).any():
        raise InputError(f"bytes of {collective.name.lower()} must be finite and not negative")
    if collective is Collective.ALL_TO_ALL:
        seconds = all_to_all_s(n, group, cluster, copies)
    else:
        seconds = FORMULAS[collective](n, group, cluster)
    seconds = np.array(np.broadcast_to(seconds, n.shape))
    notes: dict[str, None] = {}
    for ranks in np.unique(g[g > 1]):
        here = g == ranks
        measured = np.broadcast_to(_is_measured(cluster, calibration, group), n.shape) & here
        if measured.any():
            curve, note = _pick(calibration, collective, int(ranks))
            seconds[measured] = (curve.alpha_s + n / curve.bytes_per_s)[measured]
            if note:
                notes[note] = None
    return CollectiveTimes(np.where(g > 1, seconds, 0.0), tuple(notes))


def _is_measured(cluster: ClusterSpec, calibration: Calibration, group: GroupShape) -> Array:
    """Returns whether the link the group crosses is one the calibration measured."""
    links = {c.link for c in calibration.collectives}
    if not links:
        return np.zeros(group.size.shape, bool)
    if cluster.num_nodes == 1:
        return np.ones(group.size.shape, bool)
    assert cluster.network is not None
    return np.where(group.spans, cluster.network.name in links, cluster.node.link.name in links)


def _pick(
    calibration: Calibration, collective: Collective, ranks: int
) -> tuple[CollectiveCurve, str]:
    name = collective.name.lower()
    for kind in (name, *_STANDS_IN[collective]):
        mine = [c for c in calibration.collectives if c.collective == kind]
        if not mine:
            continue
        best = min(mine, key=lambda c: (abs(c.ranks - ranks), -c.ranks))
        notes = []
        if kind != name:
            notes.append(f"{name} is priced by the measured {kind}")
        if best.ranks != ranks:
            notes.append(f"{name} between {ranks} ranks is priced as between {best.ranks}")
        return best, "; ".join(notes)
    any_curve = max(calibration.collectives, key=lambda c: c.ranks)
    return any_curve, f"{name} is priced by the measured {any_curve.collective}"
