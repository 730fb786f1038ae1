"""Shipped curves against the public tables they were fitted to, and figures they were not."""

import csv
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from flopwright.ops import CostBuilder, OpKind, OpTable, Phase
from flopwright.simulator.calibration.files import SHIPPED, default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.operators.times import op_seconds
from flopwright.spec.cluster import GpuSpec
from flopwright.spec.load import load_gpu

ROOT = Path(__file__).parents[4]
TABLED = ("a100_sxm_80gb", "h100_sxm", "h200_sxm", "b200", "b300", "gb200", "gb300", "l40s")


def _burst(gpu: GpuSpec) -> Calibration:
    """The prior at the clocks and with the launches of the tables: short runs in a graph."""
    prior = default_calibration(gpu)
    curves = tuple(c.model_copy(update={"sustained": 1.0}) for c in prior.curves)
    return prior.model_copy(update={"curves": curves, "graphs": True})


def _products(kind: OpKind, dtype: str, shapes: list[tuple[int, int, int, int]]) -> OpTable:
    g, m, n, k = (np.array(x, float) for x in zip(*shapes, strict=True))
    width = 2 if dtype == "bf16" else 1
    cost = CostBuilder()
    cost.op(
        "x", kind, Phase.FORWARD, dtype=dtype, m=m, k=k, n=n, batch=g, flops=2 * g * m * n * k,
        read_bytes=width * g * (m * k + k * n), written_bytes=2 * g * m * n,
    )  # fmt: skip
    return cost.build(len(shapes)).ops


@pytest.mark.parametrize(
    ("gpu", "median"),
    [
        ("a100_sxm_80gb", 248e12), ("h100_sxm", 716e12), ("h200_sxm", 685e12), ("b200", 1465e12),
        ("b300", 1485e12), ("gb200", 1519e12), ("gb300", 1808e12), ("l40s", 186e12),
    ],
)  # fmt: skip
def test_large_products_reach_the_published_median(gpu: str, median: float) -> None:
    """Medians over m, n, k from 4,096 of the bf16 tables, on the tables' own grid."""
    m = (4096, 4097, 4352, 4353, 8192, 16384, 32768)
    sides = (4096, 5120, 6144, 7168, 8192, 10240, 12288, 16384, 51200, 65536)
    shapes = [
        (1, a, b, c) for a in m for b in sides for c in sides if a * b < 2**31 > a * c
    ]  # fmt: skip
    spec, ops = load_gpu(gpu), _products(OpKind.GEMM, "bf16", shapes)
    rates = ops.flops[0] / op_seconds(ops, spec, _burst(spec)).seconds[0]
    assert np.median(rates) == pytest.approx(median, rel=0.08)


@pytest.mark.parametrize(
    ("gpu", "width", "median"),
    [
        ("a100_sxm_80gb", 128, 199e12), ("h100_sxm", 64, 454e12), ("h100_sxm", 128, 561e12),
        ("b200", 64, 711e12), ("b200", 128, 1110e12), ("b300", 128, 1240e12),
        ("gb300", 64, 1028e12), ("gb300", 128, 1505e12), ("l40s", 128, 200e12),
    ],
)  # fmt: skip
def test_long_prefill_reaches_the_published_median(gpu: str, width: int, median: float) -> None:
    """Medians over lengths from 4,096 and 32 or more heads of all sequences."""
    s, b = np.meshgrid([4096.0, 6144, 8192, 10240, 12288, 16384], [32.0, 48, 64, 96, 128, 256])
    cost = CostBuilder()
    cost.op(
        "attention", OpKind.ATTENTION, Phase.FORWARD, dtype="bf16", m=s.ravel(), n=s.ravel(),
        k=float(width), batch=b.ravel(), flops=2 * b.ravel() * width * s.ravel() ** 2,
    )  # fmt: skip
    spec, ops = load_gpu(gpu), cost.build(s.size).ops
    rates = ops.flops[0] / op_seconds(ops, spec, _burst(spec)).seconds[0]
    assert np.median(rates) == pytest.approx(median, rel=0.15)


def _published(folder: Path, prefix: str, kind: str) -> list[tuple[tuple[int, ...], float]]:
    with (folder / "validation" / "kernels_and_links.csv").open(encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if r["id"].startswith(prefix)]
    return [
        (tuple(map(int, re.findall(r"\d+", r["shape/size"]))), float(r["value"]) * 1e12)
        for r in rows
        if r["kind"] == kind and r["metric"] == "tflops"
    ]


def test_block_scaled_products_agree_with_published_ones(measured_data: Path) -> None:
    """DeepGEMM's own figures on an H800 were in no fit; small m is a decoder's business."""
    spec = load_gpu("h800_sxm")
    dense = [x for x in _published(measured_data, "deepgemm-dense", "gemm") if x[0][0] >= 1024]
    ops = _products(OpKind.GEMM, "fp8_block", [(1, *shape) for shape, _ in dense])
    rates = ops.flops[0] / op_seconds(ops, spec, _burst(spec)).seconds[0]
    error = np.abs(rates / np.array([rate for _, rate in dense]) - 1)
    assert len(dense) == 6
    assert np.median(error) < 0.1
    assert error.max() < 0.15


def test_grouped_products_agree_with_published_ones(measured_data: Path) -> None:
    spec = load_gpu("h800_sxm")
    found = _published(measured_data, "deepgemm-grouped", "grouped_gemm")
    ops = _products(OpKind.GROUPED_GEMM, "fp8_block", [s[:4] for s, _ in found])  # type: ignore[misc]
    rates = ops.flops[0] / op_seconds(ops, spec, _burst(spec)).seconds[0]
    error = np.abs(rates / np.array([rate for _, rate in found]) - 1)
    assert len(found) == 10
    assert np.median(error) < 0.15
    assert error.max() < 0.2


@pytest.mark.parametrize("gpu", TABLED)
def test_a_refined_form_is_taken_only_where_it_beats_the_smooth_one(gpu: str) -> None:
    for curve in default_calibration(load_gpu(gpu)).curves:
        held = curve.held_out
        for form in ("smooth", "decline", "rows"):
            if f"{form}_median" not in held or curve.kind == "grouped_gemm":
                continue
            score = held[f"{form}_median"] + held[f"{form}_p90"] / 4
            assert held["median"] + held["p90"] / 4 <= score * 1.021


@pytest.mark.slow
def test_the_files_are_what_the_script_writes(
    measured_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from fit_operators import fitted_files

    written = fitted_files(measured_data / "operators")
    assert set(written) | {"cpu"} == {p.stem for p in SHIPPED.glob("*.yaml")}
    for name, text in written.items():
        assert (SHIPPED / f"{name}.yaml").read_text(encoding="utf-8") == text, name
    sys.modules.pop("fit_operators", None)


def test_held_out_errors_in_the_files_are_those_of_the_points(
    measured_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runtime forms on the tables' own points give the error that a file claims."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from operator_fits import tables

    spec = load_gpu("h100_sxm")
    points = tables.gemm(measured_data / "operators", "h100_sxm", "bf16")
    held = points.take(points.held & (points.weight >= 1))
    part = held.parts[0]
    ones = np.ones_like(part.m, int)
    shapes = list(zip(ones, part.m, part.n, part.k, strict=True))
    seconds = op_seconds(_products(OpKind.GEMM, "bf16", shapes), spec, _burst(spec)).seconds[0]
    error = np.abs(seconds / held.seconds - 1)
    curve = next(c for c in default_calibration(spec).curves if c.kind == "gemm")
    assert np.median(error) == pytest.approx(curve.held_out["median"], abs=1e-3)
    assert np.quantile(error, 0.9) == pytest.approx(curve.held_out["p90"], abs=1e-3)
    assert curve.held_out["median"] < curve.held_out["flat_median"]
