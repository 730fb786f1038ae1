"""Operator seconds: never faster than the roofline, fallbacks named, unknowns refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.ops import CostBuilder, OpKind, OpTable, Phase
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration, EfficiencyCurve
from flopwright.simulator.operators.times import op_seconds
from flopwright.spec.load import GPU_CATALOG, catalog_names, load_gpu

H800 = load_gpu("h800_sxm")
PRIOR = default_calibration(H800)


def _ops(kind: OpKind, dtype: str, phase: Phase = Phase.FORWARD, **columns: object) -> OpTable:
    cost = CostBuilder()
    cost.op("op", kind, phase, dtype=dtype, **columns)
    lengths = [np.size(v) for v in columns.values()]
    return cost.build(max(lengths, default=1)).ops


def _gemm(m: float, k: float, n: float, dtype: str = "bf16", **more: object) -> OpTable:
    return _ops(
        OpKind.GEMM, dtype, m=m, k=k, n=n, flops=2 * m * k * n,
        read_bytes=2 * (m * k + k * n), written_bytes=2 * m * n, **more,
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(*[st.floats(1, 1e5) for _ in range(3)], st.sampled_from(sorted(OpKind)))
def test_never_faster_than_the_roofline(m: float, k: float, n: float, kind: OpKind) -> None:
    flops, moved = 2 * m * k * n, 2 * (m * k + k * n + m * n)
    ops = _ops(kind, "bf16", m=m, k=k, n=n, flops=flops, read_bytes=moved)
    seconds = op_seconds(ops, H800, PRIOR).seconds
    assert np.isfinite(seconds).all()
    assert seconds[0, 0] >= max(flops / 989e12, moved / 3.35e12) + H800.launch_floor_s


@pytest.mark.parametrize("gpu", catalog_names(GPU_CATALOG))
def test_every_prior_prices_large_products_credibly(gpu: str) -> None:
    """Public GEMMs reach 0.5 to 0.9 of the dense peak, AMD's best published 0.51 to 0.62."""
    spec = load_gpu(gpu)
    seconds = op_seconds(_gemm(8192, 8192, 8192), spec, default_calibration(spec)).seconds[0, 0]
    share = 2 * 8192**3 / seconds / spec.peak_flops_per_s["bf16"]
    assert 0.4 < share < 0.9
    if gpu in {"a100_sxm_80gb", "b200", "h100_sxm", "h200_sxm", "h800_sxm"}:
        assert 0.6 < share < 0.83


@pytest.mark.parametrize("gpu", catalog_names(GPU_CATALOG))
def test_every_number_of_a_prior_has_a_source(gpu: str) -> None:
    prior = default_calibration(load_gpu(gpu))
    assert prior.curves
    assert all(c.source for c in prior.curves)
    assert "step_residual_log" in prior.sources
    assert set(prior.hidden_share) <= {k.removeprefix("hidden_share.") for k in prior.sources}


def test_count_multiplies_and_zero_is_free() -> None:
    one = op_seconds(_gemm(512, 512, 512), H800, PRIOR).seconds
    several = op_seconds(_gemm(512, 512, 512, count=[0.0, 1.0, 7.0]), H800, PRIOR).seconds
    assert several[0] == pytest.approx([0.0, one[0, 0], 7 * one[0, 0]])


def test_an_operator_of_no_size_costs_its_floor() -> None:
    seconds = op_seconds(_gemm(0, 512, 512), H800, PRIOR).seconds
    assert 0 < seconds[0, 0] < 1e-5


def test_small_shapes_are_less_efficient() -> None:
    rates = [
        2 * m * 4096**2 / op_seconds(_gemm(m, 4096, 4096), H800, PRIOR).seconds[0, 0]
        for m in (16, 256, 4096)
    ]
    assert rates == sorted(rates)


def test_backward_takes_its_own_curve_and_else_the_forward_one() -> None:
    def attention(phase: Phase) -> float:
        widths = 2 * 128 if phase is Phase.FORWARD else 5 * 128
        ops = _ops(
            OpKind.ATTENTION, "bf16", phase, m=4096.0, n=4096.0, k=128.0, batch=64.0,
            flops=64 * 4096**2 * widths,
        )  # fmt: skip
        found = op_seconds(ops, H800, PRIOR)
        assert found.assumptions == ()
        return float(found.seconds[0, 0])

    # A call's floor is paid once, whatever the work; the rest is 2.5 x the work at rate / 1.4.
    wanted = ("attention", 128, "forward", "bf16", True)
    (floor_s,) = (
        c.floor_s
        for c in PRIOR.curves
        if (c.kind, c.head_dim, c.phase, c.dtype, c.causal) == wanted
    )
    work_s = attention(Phase.FORWARD) - floor_s
    assert attention(Phase.BACKWARD_INPUT) == pytest.approx(
        floor_s + 1.4 * 2.5 * work_s, rel=0.002
    )
    forward = op_seconds(_gemm(512, 512, 512), H800, PRIOR).seconds
    backward = _ops(
        OpKind.GEMM, "bf16", Phase.BACKWARD_WEIGHT, m=512, k=512, n=512, flops=2 * 512**3,
        read_bytes=2 * 2 * 512**2, written_bytes=2 * 512**2,
    )  # fmt: skip
    assert op_seconds(backward, H800, PRIOR).seconds == pytest.approx(forward)


def test_another_dtype_is_priced_against_its_own_peak_and_named() -> None:
    found = op_seconds(_gemm(8192, 8192, 8192, "fp32"), H800, PRIOR)
    assert found.assumptions == ("gemm in fp32 is priced by the bf16 curve",)
    assert 2 * 8192**3 / found.seconds[0, 0] < 67e12


def test_a_class_without_a_curve_borrows_and_says_so() -> None:
    bare = Calibration(
        id="c", created="", source="t", curves=(EfficiencyCurve(kind="gemm", dtype="bf16"),)
    )
    found = op_seconds(_ops(OpKind.GROUPED_GEMM, "bf16", flops=1e12), H800, bare)
    assert found.assumptions == ("grouped_gemm is priced by the gemm curve",)
    nothing = Calibration(id="c", created="", source="t")
    found = op_seconds(_ops(OpKind.GEMM, "bf16", flops=1e12), H800, nothing)
    assert "has no curve" in found.assumptions[0]


def test_a_dtype_the_gpu_has_no_peak_for_is_refused() -> None:
    with pytest.raises(InputError, match=r"no peak for fp4.*known: bf16, fp16, fp32, fp64, fp8"):
        op_seconds(_gemm(512, 512, 512, "fp4"), H800, PRIOR)


def test_a_measured_peak_is_not_exceeded_either() -> None:
    curve = EfficiencyCurve(
        kind="gemm", dtype="fp32", peak_flops_per_s=1e11, max_efficiency=1.0, bytes_per_s=1e10
    )
    cpu = Calibration(id="c", created="", source="t", curves=(curve,))
    seconds = op_seconds(_gemm(1024, 1024, 1024, "fp32"), H800, cpu).seconds[0, 0]
    assert seconds == pytest.approx(2 * 1024**3 / 1e11 + H800.launch_floor_s)
