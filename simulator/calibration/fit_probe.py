"""From a probe of a machine to a first calibration: curves, and factors of reference steps.

Shapes are compared by their quickest runs, and all curves together are slowed by one
number: what the machine takes in all over what its quickest runs take. On a machine with
other work a call shorter than the scheduler's time slice often runs undisturbed and a longer
one never does, so medians would say that large calls are slow, when it is the machine that
is shared. On a quiet machine the number is near 1.

Memory-bound operators have a curve for each family of them (a norm does several passes, a
sum one). What a step adds to its operators is learnt from the probe's reference steps, like
from any measured step (fit_runs.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final, TypeVar

from flopwright.errors import InputError, Violation
from flopwright.report.drift import hardware_id
from flopwright.report.probe import CollectivePoint, OperatorPoint, ProbeReport
from flopwright.simulator.calibration.class_fit import CALL_S
from flopwright.simulator.calibration.fit_curves import fit_collective, fit_operator
from flopwright.simulator.calibration.fit_overlap import overlap_slowdowns
from flopwright.simulator.calibration.fit_runs import learn
from flopwright.simulator.calibration.identity import with_id
from flopwright.simulator.calibration.model import Calibration, CollectiveCurve, EfficiencyCurve
from flopwright.simulator.calibration.repredict import predict_measurement
from flopwright.simulator.operators.variants import family_of

# They show what memory and the host's link give; no operator of a model is one.
PLAIN_COPIES: Final = frozenset({"copy", "to_host", "from_host"})

P = TypeVar("P", OperatorPoint, CollectivePoint)

# Before a whole run was seen: dispatch between ops, cold caches and waiting are not in the
# probe. A factor of 1.5 either way, at 80 %.
UNSEEN_STEP_LOG: Final = 0.3
# After reference steps: the other kinds of plans still differ. A factor of 1.2, at 80 %.
UNSEEN_PLAN_LOG: Final = 0.15


def copy_bytes_per_s(probe: ProbeReport) -> float:
    """Returns the memory bandwidth (read + write) of the largest plain copy.

    Raises:
        InputError: the probe holds no operator that moves memory.
    """
    copies = [p for p in probe.operators if p.name == "copy"]
    streaming = copies or [p for p in probe.operators if p.moved_bytes > 0]
    if not streaming:
        raise InputError(
            Violation(
                field="probe.operators",
                rule="the probe holds no operator that moves memory: it ended too early",
                nearest_fix="probe again, with more --minutes",
            )
        )
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


def _link(points: Sequence[CollectivePoint], link: str, network: str) -> str:
    return network if points[0].spans else link


def _typical(point: CollectivePoint, slow: float) -> CollectivePoint:
    """Returns the point with what calls take in the mean.

    Reports of old hold calls between ranks that did nothing else: their quickest, slowed.
    """
    if point.seconds_mean is None:
        return _as_slowed(point, slow)
    return point.model_copy(update={"seconds": point.seconds_mean})


def fit_probe(probe: ProbeReport, link: str = "loopback", network: str = "network") -> Calibration:
    """Returns the calibration of a probe.

    Args:
        probe: what was measured.
        link: name of the link between the probed ranks, as in the cluster file; network: of
            the one between nodes.

    Raises:
        InputError: the probe holds no operator that moves memory.
    """
    peaks = peak_flops_per_s(probe)
    bandwidth = copy_bytes_per_s(probe)
    floor = max(probe.host_floor_s, 1e-7)
    best = max(peaks.values(), default=1e9)
    slow = slowdown(p for p in probe.operators if p.name not in PLAIN_COPIES)
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
        fit_collective([_typical(p, slow_links) for p in points], _link(points, link, network))
        for points in _by_collective(probe.collectives)
    ]
    calibration = _with_steps(_curves_alone(probe, curves, collectives), probe)
    return with_id(calibration, "probe")


def _curves_alone(
    probe: ProbeReport, curves: list[EfficiencyCurve], collectives: list[CollectiveCurve]
) -> Calibration:
    where = probe.fingerprint
    return Calibration(
        id="probe",
        created=probe.created,
        source=f"probe of {where.gpu or where.processor}, {where.world_size} ranks side by side",
        stack_id=where.stack_id(),
        hardware_id=hardware_id(where),
        curves=tuple(curves),
        collectives=tuple(collectives),
        host_floor_s=probe.host_floor_s,
        step_residual_log=UNSEEN_STEP_LOG,
        contended_ranks=where.world_size,
        overlap_slowdown=overlap_slowdowns(probe.overlaps),
    )


def _with_steps(calibration: Calibration, probe: ProbeReport) -> Calibration:
    """Returns the calibration with factors and calls learnt from reference steps."""
    steps = probe.steps
    if not steps:
        return calibration
    # A GPU runs behind the program that launches its work: calls are a CPU's.
    calls = {} if steps[0].fingerprint.gpu else CALL_S | _sync_s(probe)
    start = calibration.model_copy(update={"call_s": calls})
    learnt = learn(start, steps, predict_measurement).calibration
    return learnt.model_copy(update={"step_residual_log": UNSEEN_PLAN_LOG})


def _sync_s(probe: ProbeReport) -> dict[str, float]:
    """Returns how long ranks wait for the last one before a collective, the median of points.

    A burst of other work makes a few points wait a hundred times as long.
    """
    waits = [p.waiting_s for p in probe.collectives if p.waiting_s]
    return {"sync": median(waits)} if waits else {}


def _by_class(points: Iterable[OperatorPoint]) -> list[list[OperatorPoint]]:
    """Groups by kind, dtype, phase and family; plain copies only where nothing else streams."""
    groups: dict[tuple[str, str, str, str], list[OperatorPoint]] = defaultdict(list)
    for point in points:
        family = family_of(point.name) if point.kind == "memory_bound" else ""
        groups[point.kind, point.dtype, point.phase, family].append(point)
    streaming = {key[:3] for key, found in groups.items() if not _only_copies(found)}
    return [
        [p for p in groups[key] if p.name not in PLAIN_COPIES] or groups[key]
        for key in sorted(groups)
        if not _only_copies(groups[key]) or key[:3] not in streaming
    ]


def _only_copies(points: Iterable[OperatorPoint]) -> bool:
    return all(p.name in PLAIN_COPIES for p in points)


def _by_collective(points: Iterable[CollectivePoint]) -> list[list[CollectivePoint]]:
    groups: dict[tuple[str, int, bool], list[CollectivePoint]] = defaultdict(list)
    for point in points:
        groups[point.collective, point.ranks, point.spans].append(point)
    return [groups[key] for key in sorted(groups)]
