"""From a probe of a machine to a first calibration: curves only, factors all one.

Shapes are compared by their quickest runs, and all curves together are slowed by one
number: what the machine takes in all over what its quickest runs take. On a machine with
other work a call shorter than the scheduler's time slice often runs undisturbed and a longer
one never does, so medians would say that large calls are slow, when it is the machine that
is shared. On a quiet machine the number is near 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final, TypeVar

from flopwright.report.probe import CollectivePoint, OperatorPoint, ProbeReport
from flopwright.simulator.calibration.fit_curves import fit_collective, fit_operator
from flopwright.simulator.calibration.identity import with_id
from flopwright.simulator.calibration.model import Calibration

P = TypeVar("P", OperatorPoint, CollectivePoint)

# Before a whole run was seen: dispatch between ops, cold caches and waiting are not in the
# probe. A factor of 1.5 either way, at 80 %.
UNSEEN_STEP_LOG: Final = 0.3


def copy_bytes_per_s(probe: ProbeReport) -> float:
    """Returns the memory bandwidth (read + write) of the largest plain copy."""
    copies = [p for p in probe.operators if p.name == "copy"]
    streaming = copies or [p for p in probe.operators if p.moved_bytes > 0]
    largest = max(streaming, key=lambda p: p.moved_bytes)
    return largest.moved_bytes / largest.seconds


def peak_flops_per_s(probe: ProbeReport) -> dict[str, float]:
    """Returns the best rate of a matrix product by dtype."""
    best: dict[str, float] = {}
    for point in probe.operators:
        if point.kind == "gemm":
            rate = point.flops / point.seconds_min
            best[point.dtype] = max(best.get(point.dtype, 0.0), rate)
    return best


def slowdown(points: Iterable[OperatorPoint | CollectivePoint]) -> float:
    """Returns the sum of median over the sum of quickest seconds; 1 of no points."""
    pairs = [(p.seconds, p.seconds_min) for p in points]
    return sum(s for s, _ in pairs) / sum(q for _, q in pairs) if pairs else 1.0


def _as_slowed(point: P, factor: float) -> P:
    return point.model_copy(update={"seconds": point.seconds_min * factor})


def fit_probe(probe: ProbeReport, link: str = "loopback") -> Calibration:
    """Returns the calibration of a probe.

    Args:
        probe: what was measured.
        link: name of the link between the probed ranks, as in the cluster file.
    """
    peaks = peak_flops_per_s(probe)
    bandwidth = copy_bytes_per_s(probe)
    floor = max(probe.host_floor_s, 1e-7)
    best = max(peaks.values(), default=1e9)
    slow = slowdown(p for p in probe.operators if p.name != "copy")
    curves = [
        fit_operator(
            [_as_slowed(p, slow) for p in points],
            peak_flops_per_s=peaks.get(points[0].dtype, best),
            bytes_per_s=bandwidth,
            floor_s=3 * floor,
        )
        for points in _by_class(probe.operators)
    ]
    slow_links = slowdown(probe.collectives)
    collectives = [
        fit_collective([_as_slowed(p, slow_links) for p in points], link)
        for points in _by_collective(probe.collectives)
    ]
    where = probe.fingerprint
    calibration = Calibration(
        id="probe",
        created=probe.created,
        source=f"probe of {where.gpu or where.processor}, {where.world_size} ranks side by side",
        stack_id=where.stack_id(),
        curves=tuple(curves),
        collectives=tuple(collectives),
        host_floor_s=probe.host_floor_s,
        step_residual_log=UNSEEN_STEP_LOG,
        contended_ranks=where.world_size,
    )
    return with_id(calibration, "probe")


def _by_class(points: Iterable[OperatorPoint]) -> list[list[OperatorPoint]]:
    """Groups by kind, dtype and phase; plain copies only where nothing else streams."""
    groups: dict[tuple[str, str, str], list[OperatorPoint]] = defaultdict(list)
    for point in points:
        groups[point.kind, point.dtype, point.phase].append(point)
    without_copies = {
        key: [p for p in found if p.name != "copy"] or found for key, found in groups.items()
    }
    return [without_copies[key] for key in sorted(without_copies)]


def _by_collective(points: Iterable[CollectivePoint]) -> list[list[CollectivePoint]]:
    groups: dict[tuple[str, int], list[CollectivePoint]] = defaultdict(list)
    for point in points:
        groups[point.collective, point.ranks].append(point)
    return [groups[key] for key in sorted(groups)]
