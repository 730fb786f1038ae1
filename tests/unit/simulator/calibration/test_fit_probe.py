"""Hidden curves, noisy points with outliers: the fit must find the curves again."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.report.metrics import Fingerprint
from flopwright.report.probe import CollectivePoint, OperatorPoint, ProbeReport
from flopwright.simulator.calibration.cluster_file import cluster_from_probe
from flopwright.simulator.calibration.fit_curves import fit_collective, fit_operator
from flopwright.simulator.calibration.fit_probe import _sync_s, fit_probe, slowdown
from flopwright.simulator.calibration.model import EfficiencyCurve

TRUTH = {"top": 8e10, "half_m": 40.0, "half_k": 12.0, "half_n": 25.0, "bytes_per_s": 2e10}
FLOOR_S = 3e-5
FINGERPRINT = Fingerprint(
    machine="m",
    processor="p",
    num_cores=2,
    world_size=2,
    threads_per_rank=1,
    memory_bytes=2**33,
    python="3.11",
    tool_version="0",
)


def product_seconds(m: float, k: float, n: float) -> float:
    rate = TRUTH["top"] * m / (m + TRUTH["half_m"])
    rate *= k / (k + TRUTH["half_k"]) * n / (n + TRUTH["half_n"])
    moved = 4 * (m * k + k * n + m * n)
    return FLOOR_S + max(2 * m * k * n / rate, moved / TRUTH["bytes_per_s"])


def point(m: float, k: float, n: float, seconds: float, **changes: object) -> OperatorPoint:
    values: dict[str, object] = {
        "kind": "gemm",
        "name": "linear",
        "dtype": "fp32",
        "m": m,
        "k": k,
        "n": n,
        "flops": 2 * m * k * n,
        "moved_bytes": 4 * (m * k + k * n + m * n),
        "seconds": seconds,
        "seconds_min": 0.9 * seconds,
        "seconds_p90": 1.3 * seconds,
    }
    return OperatorPoint.model_validate(values | changes)


def noisy_points(seed: int, noise: float = 0.05, outliers: int = 4) -> list[OperatorPoint]:
    rng = np.random.default_rng(seed)
    shapes = list(itertools.product((32, 128, 512, 2048), (64, 256, 1024), (32, 192, 1024)))
    factors = np.exp(rng.normal(0, noise, len(shapes)))
    factors[rng.choice(len(shapes), outliers, replace=False)] *= 4.0
    return [point(*s, product_seconds(*s) * f) for s, f in zip(shapes, factors, strict=True)]


def curve_seconds(curve: EfficiencyCurve, p: OperatorPoint) -> float:
    """The formula of simulator/calibration/model.py, written out again."""
    share = curve.max_efficiency
    for size, half in ((p.m, curve.half_m), (p.k, curve.half_k), (p.n, curve.half_n)):
        share *= size / (size + half)
    compute = p.flops / ((curve.peak_flops_per_s or math.nan) * share) if p.flops else 0.0
    assert curve.bytes_per_s is not None
    return curve.floor_s + max(compute, p.moved_bytes / curve.bytes_per_s)


@pytest.mark.parametrize("seed", range(5))
def test_a_hidden_product_curve_is_found_under_noise_and_outliers(seed: int) -> None:
    curve = fit_operator(noisy_points(seed), peak_flops_per_s=1e11, bytes_per_s=1e10, floor_s=1e-5)
    assert curve.peak_flops_per_s == 1e11
    assert curve.max_efficiency == pytest.approx(0.8, rel=0.15)
    assert curve.floor_s == pytest.approx(FLOOR_S, rel=0.2)
    # Top and half sizes trade against each other; what counts is the time of
    # shapes that were not measured, inside and beyond the grid
    for shape in ((64, 96, 640), (512, 192, 2304), (4096, 2048, 2048), (256, 512, 64)):
        truth = product_seconds(*shape)
        assert curve_seconds(curve, point(*shape, truth)) == pytest.approx(truth, rel=0.1)
    assert curve.domain == {"m": (32.0, 2048.0), "k": (64.0, 1024.0), "n": (32.0, 1024.0)}


def test_without_noise_the_fit_is_within_three_percent_everywhere() -> None:
    points = noisy_points(0, noise=0.0, outliers=0)
    curve = fit_operator(points, peak_flops_per_s=1e11, bytes_per_s=1e10, floor_s=1e-5)
    for p in points:
        assert curve_seconds(curve, p) == pytest.approx(p.seconds, rel=0.03)
    assert curve.residual_log < 0.02


def test_one_point_is_enough_for_a_curve_through_it() -> None:
    only = [point(128, 64, 128, 1e-3)]
    curve = fit_operator(only, peak_flops_per_s=1e11, bytes_per_s=1e10, floor_s=1e-6)
    assert curve_seconds(curve, only[0]) == pytest.approx(1e-3, rel=0.15)


@settings(max_examples=60, deadline=None)
@given(
    base=st.tuples(*[st.integers(1, 4096)] * 3),
    axis=st.integers(0, 2),
    factor=st.floats(1.01, 8.0),
)
def test_a_larger_product_never_takes_less_time(
    base: tuple[int, int, int], axis: int, factor: float
) -> None:
    curve = _CURVE
    larger = [float(v) for v in base]
    larger[axis] *= factor
    small, large = point(*base, 1.0), point(*larger, 1.0)
    assert curve_seconds(curve, large) >= curve_seconds(curve, small) * (1 - 1e-12)


_CURVE = fit_operator(noisy_points(9), peak_flops_per_s=1e11, bytes_per_s=1e10, floor_s=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_a_streaming_curve_is_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = []
    for i, nbytes in enumerate(np.geomspace(1e3, 1e8, 14)):
        seconds = (2e-5 + nbytes / 6e9) * math.exp(rng.normal(0, 0.05)) * (5 if i == 6 else 1)
        points.append(
            point(nbytes / 8, 1, 1, seconds, kind="memory_bound", flops=0, moved_bytes=nbytes)
        )
    curve = fit_operator(points, peak_flops_per_s=1e11, bytes_per_s=1e10, floor_s=1e-6)
    assert curve.bytes_per_s == pytest.approx(6e9, rel=0.1)
    assert curve.floor_s == pytest.approx(2e-5, rel=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_alpha_and_bandwidth_of_a_collective_are_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = [
        collective(n, (1.5e-4 + n / 8e8) * math.exp(rng.normal(0, 0.05)))
        for n in (4096, 65536, 2**20, 2**22, 2**24)
    ]
    curve = fit_collective(points, "loopback")
    assert curve.alpha_s == pytest.approx(1.5e-4, rel=0.2)
    assert curve.bytes_per_s == pytest.approx(8e8, rel=0.15)
    assert (curve.link, curve.ranks, curve.points) == ("loopback", 2, 5)
    assert curve.domain_bytes == (4096.0, 2.0**24)


def collective(nbytes: float, quickest: float, late: float = 1.0) -> CollectivePoint:
    return CollectivePoint(
        collective="all_reduce",
        ranks=2,
        nbytes=nbytes,
        seconds=quickest * late,
        seconds_min=quickest,
        seconds_p90=2 * quickest * late,
    )


def test_a_shared_machine_slows_all_curves_alike() -> None:
    """Calls longer than a time slice are always interrupted, short ones seldom."""

    def on(shared: bool) -> ProbeReport:
        def late(seconds: float) -> float:
            return 2.5 if shared and seconds > 4e-3 else 1.0

        operators = [
            p.model_copy(update={"seconds": p.seconds * late(p.seconds), "seconds_min": p.seconds})
            for p in noisy_points(1, noise=0.02, outliers=0)
        ]
        messages = [
            collective(n, q, late(q)) for n, q in ((4096, 2e-4), (2**20, 1.5e-3), (2**24, 2e-2))
        ]
        return ProbeReport(
            created="",
            fingerprint=FINGERPRINT,
            host_floor_s=2e-6,
            operators=tuple(operators),
            collectives=tuple(messages),
        )

    quiet, busy = on(False), on(True)
    assert slowdown(quiet.operators) == 1.0
    slow = slowdown(busy.operators)
    assert 2.0 < slow < 2.5
    before, after = fit_probe(quiet), fit_probe(busy)
    for shape in ((64, 96, 640), (512, 192, 2304), (2048, 1024, 1024)):
        p = point(*shape, 1.0)
        times = curve_seconds(before.curves[0], p), curve_seconds(after.curves[0], p)
        assert times[1] / times[0] == pytest.approx(slow, rel=0.1)
    assert after.collectives[0].bytes_per_s < before.collectives[0].bytes_per_s / 2


def test_a_report_becomes_one_curve_a_class_and_one_id_a_content() -> None:
    copy = point(
        2**22, 1, 1, 2**25 / 8e9, kind="memory_bound", name="copy", flops=0, moved_bytes=2**25
    )
    norm = point(
        2**16, 1, 1, 2e-4, kind="memory_bound", name="rms_norm", flops=0, moved_bytes=2**19
    )
    backward = [p.model_copy(update={"phase": "backward"}) for p in noisy_points(2)]
    report = ProbeReport(
        created="2026-01-02T03:04:05+00:00",
        fingerprint=FINGERPRINT,
        host_floor_s=2e-6,
        operators=(*noisy_points(1), *backward, copy, norm),
    )
    calibration = fit_probe(report)
    keys = [(c.kind, c.dtype, c.phase) for c in calibration.curves]
    assert keys == [
        ("gemm", "fp32", "backward"), ("gemm", "fp32", "forward"),
        ("memory_bound", "fp32", "forward"),
    ]  # fmt: skip
    assert calibration.curves[2].points == 1  # plain copies are no operator of a model
    assert calibration.stack_id == FINGERPRINT.stack_id()
    assert calibration.contended_ranks == 2
    assert fit_probe(report).id == calibration.id
    slower = report.model_copy(update={"host_floor_s": 4e-6})
    assert fit_probe(slower).id != calibration.id


def test_a_probe_without_operators_is_refused() -> None:
    empty = ProbeReport(created="", host_floor_s=0.0, operators=(), fingerprint=FINGERPRINT)
    for reads in (fit_probe, cluster_from_probe):
        with pytest.raises(InputError, match="ended too early"):
            reads(empty)


def test_a_burst_in_a_few_points_is_not_what_ranks_wait() -> None:
    def waited(seconds: float) -> CollectivePoint:
        return CollectivePoint(
            collective="all_reduce", ranks=2, nbytes=1.0, seconds=1.0, seconds_min=1.0,
            seconds_p90=1.0, waiting_s=seconds,
        )  # fmt: skip

    points = (*(waited(3e-4) for _ in range(20)), waited(0.2), waited(0.3))
    probe = ProbeReport(
        created="", host_floor_s=0.0, operators=(), collectives=points, fingerprint=FINGERPRINT
    )
    assert _sync_s(probe) == {"sync": pytest.approx(3e-4)}
