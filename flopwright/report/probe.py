"""What a probe of a machine measured: raw points, from which a calibration is fitted."""

from __future__ import annotations

from statistics import median
from typing import Final, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from flopwright.report.metrics import Fingerprint, Measurement
from flopwright.spec.base import Spec


class OperatorPoint(Spec):
    """One operator timed at one shape; seconds are the median of the repeats.

    Attributes:
        kind: kernel class.
        m, k, n, batch: as in OpTable; flops and moved bytes (read + written) of one run.
        repeats: calls that were timed, of all ranks together; 0 in reports of old.
    """

    kind: Literal[
        "gemm", "grouped_gemm", "attention", "kda", "memory_bound", "optimizer", "quantize"
    ]
    name: str
    dtype: str
    phase: Literal["forward", "backward"] = "forward"
    m: float = 1.0
    k: float = 1.0
    n: float = 1.0
    batch: float = 1.0
    flops: NonNegativeFloat = 0.0
    moved_bytes: NonNegativeFloat = 0.0
    seconds: PositiveFloat
    seconds_min: PositiveFloat
    seconds_p90: PositiveFloat
    repeats: int = 0


class CollectivePoint(Spec):
    """One collective timed at one payload (bytes as in CommTable).

    Attributes:
        spans: whether its ranks stand on several nodes.
        seconds_mean: over the repeats, the slowest tenth as slow as the rest's slowest: what
            many calls take in all. None in reports of old.
        waiting_s: how long a rank waits for the last one to come, in the same mean; ranks
            computed for a millisecond or so before. None where they did not.
    """

    collective: Literal[
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast"
    ]
    ranks: int
    spans: bool = False
    nbytes: PositiveFloat
    seconds: PositiveFloat
    seconds_min: PositiveFloat
    seconds_p90: PositiveFloat
    seconds_mean: PositiveFloat | None = None
    waiting_s: NonNegativeFloat | None = None
    repeats: int = 0


class StoragePoint(Spec):
    """A checkpoint's tensor file of `nbytes`, written or read by every rank at once."""

    what: Literal["write", "read"]
    ranks: int
    nbytes: PositiveInt
    seconds: PositiveFloat


class LinkPoint(Spec):
    """A message of `nbytes` between two ranks while the others are silent, one way."""

    ranks: tuple[int, int]
    within_node: bool
    nbytes: PositiveInt
    seconds: PositiveFloat


class RankSpeed(Spec):
    """How a rank's processor did beside the others: its time over theirs, the median operator."""

    rank: int
    host: str
    local_rank: int
    slowdown: PositiveFloat


class OverlapPoint(Spec):
    """A collective of `nbytes` between all ranks beside products that take longer than it.

    Attributes:
        comm_s, compute_s: seconds of each alone; both_s: of both at the same time.
    """

    collective: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    ranks: PositiveInt
    nbytes: PositiveFloat
    comm_s: PositiveFloat
    compute_s: PositiveFloat
    both_s: PositiveFloat
    repeats: int = 0

    @property
    def slowdown(self) -> float:
        """Seconds that compute loses for every second of traffic beside it: 0 none, 1 all."""
        hidden_s = min(self.comm_s, self.compute_s)
        return max(0.0, self.both_s - max(self.comm_s, self.compute_s)) / hidden_s


class ProbePart(Spec):
    """What one unit of a probe found.

    Attributes:
        rank_log: for a timed operator, log of each rank's median over the median of all.
    """

    host_floor_s: NonNegativeFloat | None = None
    operators: tuple[OperatorPoint, ...] = ()
    collectives: tuple[CollectivePoint, ...] = ()
    overlaps: tuple[OverlapPoint, ...] = ()
    storage: tuple[StoragePoint, ...] = ()
    links: tuple[LinkPoint, ...] = ()
    ranks: tuple[RankSpeed, ...] = ()
    steps: tuple[Measurement, ...] = ()
    rank_log: tuple[float, ...] = ()


# A processor this much slower than the median one, a link than others of its kind, is named.
SLOW_RANK: Final = 1.15
SLOW_LINK: Final = 1.5


class ProbeReport(Spec):
    """A probe of one machine with a given number of processes.

    Attributes:
        device_memory_bytes: memory of one rank's GPU; None where ranks share the host's.
        nodes: nodes that the ranks stand on, equally many on each.
        steps: reference steps: models cut down to a few layers, trained the plain way.
        overlaps: collectives beside compute; empty in reports of old.
    """

    kind: Literal["probe"] = "probe"
    created: str
    fingerprint: Fingerprint
    device_memory_bytes: PositiveInt | None = None
    host_floor_s: NonNegativeFloat
    operators: tuple[OperatorPoint, ...]
    collectives: tuple[CollectivePoint, ...] = ()
    overlaps: tuple[OverlapPoint, ...] = ()
    steps: tuple[Measurement, ...] = ()
    nodes: PositiveInt = 1
    storage: tuple[StoragePoint, ...] = ()
    links: tuple[LinkPoint, ...] = ()
    ranks: tuple[RankSpeed, ...] = ()

    def slow_ranks(self) -> tuple[RankSpeed, ...]:
        """Returns the ranks whose processor is clearly slower than the others', worst first."""
        found = [r for r in self.ranks if r.slowdown > SLOW_RANK]
        return tuple(sorted(found, key=lambda r: -r.slowdown))

    def slow_links(self) -> tuple[LinkPoint, ...]:
        """Returns the links clearly slower than the median of their kind, worst first."""
        found: list[tuple[float, LinkPoint]] = []
        for within in (True, False):
            mine = [p for p in self.links if p.within_node is within]
            typical = median(p.seconds for p in mine) if len(mine) > 1 else 0.0
            found += [
                (p.seconds / typical, p) for p in mine if p.seconds > SLOW_LINK * typical > 0
            ]
        return tuple(p for _, p in sorted(found, key=lambda pair: -pair[0]))
