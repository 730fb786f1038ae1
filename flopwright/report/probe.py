"""What a probe of a machine measured: raw points, from which a calibration is fitted."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from flopwright.report.metrics import Fingerprint
from flopwright.spec.base import Spec


class OperatorPoint(Spec):
    """One operator timed at one shape; seconds are the median of the repeats.

    Attributes:
        kind: kernel class: gemm, grouped_gemm, attention, memory_bound, optimizer.
        m, k, n, batch: as in OpTable; flops and moved bytes (read + written) of one run.
    """

    kind: Literal["gemm", "grouped_gemm", "attention", "memory_bound", "optimizer"]
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


class CollectivePoint(Spec):
    """One collective timed at one payload (bytes as in CommTable)."""

    collective: Literal[
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast"
    ]
    ranks: int
    nbytes: PositiveFloat
    seconds: PositiveFloat
    seconds_min: PositiveFloat
    seconds_p90: PositiveFloat


class ProbeReport(Spec):
    """A probe of one machine with a given number of processes.

    Attributes:
        device_memory_bytes: memory of one rank's GPU; None where ranks share the host's.
    """

    kind: Literal["probe"] = "probe"
    created: str
    fingerprint: Fingerprint
    device_memory_bytes: PositiveInt | None = None
    host_floor_s: NonNegativeFloat
    operators: tuple[OperatorPoint, ...]
    collectives: tuple[CollectivePoint, ...] = ()
