"""A probe of one process: every shape the model runs, and a fit that explains its own points."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from flopwright.executor.measure import probe_operators
from flopwright.executor.measure.fingerprint import fingerprint
from flopwright.executor.measure.probe import measure_cases
from flopwright.executor.measure.probe_cases import (
    ProbeCase,
    attention_case,
    grouped_case,
    linear_case,
    norm_case,
)
from flopwright.executor.measure.probe_plain import copy_case
from flopwright.executor.measure.probe_points import shapes_for
from flopwright.executor.measure.probe_timing import (
    Clock,
    Ranks,
    choose_repeats,
    spread,
    time_calls,
)
from flopwright.models.transformer.cost import layer_cost
from flopwright.ops import OpKind, Phase, ShardShape
from flopwright.report.probe import OperatorPoint, ProbeReport
from flopwright.simulator.calibration.cluster_file import cluster_from_probe
from flopwright.simulator.calibration.fit_probe import fit_probe, slowdown
from flopwright.spec.load import dump_yaml, load_cluster, load_scenario

CPU = torch.device("cpu")
SCENARIO = load_scenario("kimi_k2_mini_2cpu_fp32")


def test_every_product_and_attention_row_of_the_model_is_probed() -> None:
    cases = shapes_for(SCENARIO.model, SCENARIO.workload, (4,), (1,), (1, 2))
    probed = {
        (int(c.rows.kind[i]), c.rows.dtype[i], *(float(x[i, 0]) for x in _shape(c.rows)))
        for c in cases
        for i in range(len(c.rows))
    }
    for ep in (1, 2):
        shape = ShardShape(micro_batch_size=4, seq_len=128, ep=ep, dtype="fp32")
        for layer in range(-1, SCENARIO.model.num_layers + 1):
            ops = layer_cost(SCENARIO.model, layer, shape).ops
            for i in range(len(ops)):
                if ops.kind[i] != OpKind.MEMORY_BOUND and ops.count[i, 0]:
                    key = (int(ops.kind[i]), ops.dtype[i], *(float(x[i, 0]) for x in _shape(ops)))
                    assert key in probed, ops.name[i]


def _shape(rows: object) -> tuple[np.ndarray, ...]:
    return tuple(getattr(rows, name) for name in ("m", "k", "n", "batch", "flops"))


@pytest.mark.parametrize(
    "case",
    shapes_for(SCENARIO.model, SCENARIO.workload, (1,)),
    ids=lambda c: f"{c.name}-{c.rows.m[0, 0]:g}x{c.rows.k[0, 0]:g}x{c.rows.n[0, 0]:g}",
)
def test_each_case_runs_and_gives_a_gradient_where_it_has_a_backward_row(case: ProbeCase) -> None:
    prepared = case.prepare(CPU)
    out = prepared.run()
    assert torch.isfinite(out).all()
    backward = [i for i in range(len(case.rows)) if case.rows.phase[i] != Phase.FORWARD]
    if prepared.inputs:
        assert backward
        grads = torch.autograd.grad(out, prepared.inputs, torch.ones_like(out))
        assert [g.shape for g in grads] == [x.shape for x in prepared.inputs]


def test_the_smallest_budget_still_runs_every_essential_case_and_drops_the_rest() -> None:
    cases = [
        linear_case(64, 32, 64, "fp32"),
        grouped_case(8, 4, 32, 16, "fp32"),
        attention_case(1, 16, 2, 2, 8, 8, "fp32"),
        linear_case(32, 32, 32, "fp32", essential=False),
    ]
    report = measure_cases(cases, fingerprint(1), CPU, budget_s=1e-6)
    names = {(p.name, p.phase) for p in report.operators}
    assert {("linear", "forward"), ("linear", "backward"), ("grouped_gemm", "backward")} <= names
    assert {p.m for p in report.operators if p.name == "linear"} == {64.0}
    assert report.collectives == ()
    for p in report.operators:
        assert p.seconds_min <= p.seconds <= p.seconds_p90


def test_backward_rows_share_one_time_by_their_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.array([[[1.0, 3.0], [1.0, 3.0], [2.0, 5.0]]])
    monkeypatch.setattr(probe_operators, "time_calls_by_rank", lambda *_, **__: samples)
    report = measure_cases([linear_case(64, 32, 48, "fp32")], fingerprint(1), CPU, budget_s=0.2)
    rows = [p for p in report.operators if p.name == "linear"]
    # the two gradients have the same FLOPs: half of the backward pass each
    assert [(p.phase, p.m, p.k, p.n, p.seconds, p.seconds_min) for p in rows] == [
        ("forward", 64, 32, 48, 1.0, 1.0),
        ("backward", 64, 48, 32, 1.5, 1.5),
        ("backward", 48, 64, 32, 1.5, 1.5),
    ]


def test_repeats_and_spread() -> None:
    assert choose_repeats(0.1, 1.0, 3, 200) == 10
    assert choose_repeats(10.0, 1.0, 3, 200) == 3
    assert choose_repeats(1e-9, 1.0, 3, 200) == 200
    found = spread(np.array([3.0, 1.0, 2.0, 10.0, 4.0]))
    assert (found.median_s, found.min_s) == (3.0, 1.0)
    assert found.p90_s == pytest.approx(np.quantile([1, 2, 3, 4, 10], 0.9))


def test_calls_are_timed_between_their_marks() -> None:
    ticks = iter(range(1000))
    samples = time_calls(
        lambda: [float(next(ticks)), float(next(ticks)) + 0.5, float(next(ticks)) + 1.0],
        Clock(CPU),
        Ranks(CPU),
        seconds=60.0,
        most=7,
    )
    assert samples.shape == (7, 2)
    np.testing.assert_array_equal(samples, 1.5)


@pytest.mark.slow
def test_the_fit_of_a_real_probe_explains_its_points(tmp_path: Path) -> None:
    cases = [
        *shapes_for(SCENARIO.model, SCENARIO.workload, (2,)),
        *[linear_case(n, n, n, "fp32") for n in (32, 64, 128, 256, 384)],
        copy_case(2**22),
        norm_case(4096, 512, "fp32"),
    ]
    report = measure_cases(cases, fingerprint(1), CPU, budget_s=6.0)
    assert ProbeReport.model_validate_json(report.model_dump_json()) == report
    calibration = fit_probe(report)
    assert calibration.stack_id == report.fingerprint.stack_id()
    curves = {(c.kind, c.dtype, c.phase): c for c in calibration.curves}

    def error(p: OperatorPoint) -> float:
        curve = curves[p.kind, p.dtype, p.phase]
        assert curve.bytes_per_s is not None
        share = curve.max_efficiency
        for size, half in ((p.m, curve.half_m), (p.k, curve.half_k), (p.n, curve.half_n)):
            share *= size / (size + half)
        compute = p.flops / ((curve.peak_flops_per_s or 1.0) * share) if p.flops else 0.0
        fitted = curve.floor_s + max(compute, p.moved_bytes / curve.bytes_per_s)
        return abs(fitted / p.seconds - 1)

    points = [p for p in report.operators if p.name != "copy"]
    # the curves are of quickest runs, slowed alike (fit_probe.py)
    slow = slowdown(points)
    errors = [error(p.model_copy(update={"seconds": slow * p.seconds_min})) for p in points]
    assert statistics.median(errors) < 0.3
    path = tmp_path / "cluster.yaml"
    path.write_text(dump_yaml(cluster_from_probe(report)))
    cluster = load_cluster(path)
    assert cluster == cluster_from_probe(report)
    assert cluster.node.gpu.kind == "cpu"
    assert cluster.num_gpus == 1
    assert cluster.node.gpu.hbm_bytes - report.fingerprint.memory_bytes + 2**26 >= 0
