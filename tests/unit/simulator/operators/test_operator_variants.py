"""Which curve a row takes: mask, head width, family and format; extrapolations are said."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.kernels.attention.cost import attention
from flopwright.ops import CostBuilder, OpKind, OpTable, Phase
from flopwright.simulator.calibration.files import SHIPPED, default_calibration, read_calibration
from flopwright.simulator.calibration.model import Calibration, EfficiencyCurve
from flopwright.simulator.operators.domain import extrapolations
from flopwright.simulator.operators.forms import efficiency
from flopwright.simulator.operators.times import op_seconds
from flopwright.simulator.operators.variants import Variant, family_of, variant_of
from flopwright.spec.load import GPU_CATALOG, catalog_names, load_gpu

H100 = load_gpu("h100_sxm")
PRIOR = default_calibration(H100)
CURVES = [
    (path.stem, curve)
    for path in sorted(SHIPPED.glob("*.yaml"))
    for curve in read_calibration(path).curves
]


def _attention(width: int, *, window: int | None = None, v_width: int | None = None) -> OpTable:
    cost = CostBuilder()
    attention(
        cost, "attention", sequences=1, seq_len=4096, heads=32, kv_heads=8, qk_width=width,
        v_width=v_width or width, dtype="bf16", window=window,
    )  # fmt: skip
    return cost.build().ops


def _gemm(m: float, k: float, n: float, dtype: str) -> OpTable:
    cost = CostBuilder()
    cost.op(
        "gemm", OpKind.GEMM, Phase.FORWARD, dtype=dtype, m=m, k=k, n=n, flops=2 * m * k * n,
        read_bytes=m * k + k * n, written_bytes=2 * m * n,
    )  # fmt: skip
    return cost.build().ops


def test_attention_rows_of_the_models_are_causal_and_name_their_width() -> None:
    ops = _attention(192, v_width=128)
    assert variant_of(ops, 0) == Variant("attention", "bf16", "forward", head_dim=192)
    assert variant_of(ops, 1) == Variant("attention", "bf16", "backward", head_dim=192)
    assert variant_of(_attention(128, window=512), 0).causal


def test_a_row_that_sees_every_pair_takes_the_unmasked_curve() -> None:
    cost = CostBuilder()
    cost.op(
        "attention", OpKind.ATTENTION, Phase.FORWARD, dtype="bf16", m=4096, n=4096, k=64,
        batch=16, flops=4 * 16 * 4096**2 * 64,
    )  # fmt: skip
    assert not variant_of(cost.build().ops, 0).causal


def test_narrow_heads_run_at_a_lower_rate_as_published() -> None:
    """FlashAttention-3 (arXiv 2407.08608, figure 5): width 64 is well below width 128."""
    narrow, wide = (op_seconds(_attention(w), H100, PRIOR) for w in (64, 128))
    assert narrow.assumptions == wide.assumptions == ()
    rates = [w / found.seconds[0, 0] for w, found in ((64, narrow), (128, wide))]
    assert 0.6 < rates[0] / rates[1] < 0.95


def test_a_head_width_far_from_every_curve_is_said() -> None:
    found = op_seconds(_attention(512), H100, PRIOR)
    assert "attention of width 512 is priced by the curve of 192" in found.assumptions[0]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("layers.moe.permute", "permute"), ("mlp.unpermute", "permute"), ("q_a_norm", "norm"),
        ("mlp.swiglu", "activation"), ("residual", ""), ("cross_entropy", "loss"),
    ],
)  # fmt: skip
def test_families_come_from_names(name: str, family: str) -> None:
    assert family_of(name) == family


def test_permutes_stream_slower_than_norms() -> None:
    def seconds(name: str) -> float:
        cost = CostBuilder()
        cost.op(name, OpKind.MEMORY_BOUND, Phase.FORWARD, dtype="bf16", read_bytes=1e9)
        return float(op_seconds(cost.build().ops, load_gpu("b200"), B200).seconds[0, 0])

    B200 = default_calibration(load_gpu("b200"))
    assert seconds("permute") > 1.2 * seconds("norm")


def test_recipes_work_against_the_peak_of_their_format() -> None:
    b200 = load_gpu("b200")
    prior = default_calibration(b200)
    times = {}
    for dtype in ("bf16", "fp8", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"):
        found = op_seconds(_gemm(8192, 8192, 8192, dtype), b200, prior)
        assert found.assumptions == (), dtype
        times[dtype] = found.seconds[0, 0]
    assert times["fp8"] == times["fp8_tensor"]
    assert times["mxfp8"] == times["fp8_block"]
    assert times["nvfp4"] < times["fp8_block"] < times["bf16"]


def test_a_format_without_a_peak_is_refused_with_what_there_is() -> None:
    with pytest.raises(InputError, match=r"peak_flops.fp4: .*no peak for nvfp4"):
        op_seconds(_gemm(512, 512, 512, "nvfp4"), H100, PRIOR)


def test_a_recipe_without_a_curve_takes_the_nearest_format_and_says_so() -> None:
    found = op_seconds(_gemm(8192, 8192, 8192, "mxfp8"), H100, PRIOR)
    assert found.assumptions == ("gemm in mxfp8 is priced by the fp8_block curve",)


def test_a_shape_outside_the_points_is_an_extrapolation_that_says_so() -> None:
    inside = op_seconds(_gemm(8192, 8192, 8192, "bf16"), H100, PRIOR)
    outside = op_seconds(_gemm(131_072, 8192, 163_840, "bf16"), H100, PRIOR)
    assert inside.assumptions == ()
    said = "gemm in bf16 is extrapolated to m above 32,768, n above 65,536"
    assert outside.assumptions == (said,)
    assert extrapolations(outside.assumptions) == 1
    assert extrapolations(("gemm in fp16 is priced by the bf16 curve",)) == 0
    assert outside.seconds[0, 0] > 2 * 131_072 * 8192 * 163_840 / 989e12


def test_rows_that_no_candidate_runs_extrapolate_nothing() -> None:
    cost = CostBuilder()
    cost.op(
        "gemm", OpKind.GEMM, Phase.FORWARD, dtype="bf16", m=[1e6, 4096.0], k=4096, n=4096,
        flops=1e12, count=[0.0, 1.0],
    )  # fmt: skip
    assert op_seconds(cost.build(2).ops, H100, PRIOR).assumptions == ()


def test_graphs_leave_the_kernels_own_floor() -> None:
    tiny = _gemm(16, 64, 64, "bf16")
    floor = next(c.floor_s for c in PRIOR.curves if c.kind == "gemm" and c.dtype == "bf16")
    eager = op_seconds(tiny, H100, PRIOR).seconds[0, 0]
    replayed = op_seconds(tiny, H100, PRIOR.model_copy(update={"graphs": True})).seconds[0, 0]
    assert floor < H100.launch_floor_s <= eager
    assert floor <= replayed < H100.launch_floor_s


@settings(max_examples=300, deadline=None)
@given(*[st.floats(1, 1e6) for _ in range(4)], st.integers(0, len(CURVES) - 1))
def test_every_shipped_curve_is_a_share_and_time_grows_with_the_shape(
    m: float, k: float, n: float, batch: float, which: int
) -> None:
    _, curve = CURVES[which]

    def at(scale: float) -> tuple[float, float]:
        a, b, c = (np.array([x]) for x in (m * scale, k, n))
        flops = 2 * a * b * c * batch
        share = efficiency(curve, a, b, c, rows=batch * a, flops=flops)[0]
        return float(share), float(flops[0] / share)

    (share, work), (_, more) = at(1.0), at(2.0)
    assert 0 < share <= 1
    assert more > work


@pytest.mark.parametrize("gpu", catalog_names(GPU_CATALOG))
def test_grouped_products_are_no_faster_than_one_of_all_rows(gpu: str) -> None:
    spec = load_gpu(gpu)
    prior = default_calibration(spec)
    m, k, n, experts = 1024.0, 7168.0, 4096.0, 8.0
    cost = CostBuilder()
    for kind, rows, batch in ((OpKind.GROUPED_GEMM, m, experts), (OpKind.GEMM, m * experts, 1)):
        cost.op(
            "x", kind, Phase.FORWARD, dtype="bf16", m=rows, k=k, n=n, batch=batch,
            flops=2 * m * experts * k * n, read_bytes=2 * experts * k * n,
        )  # fmt: skip
    grouped, dense = op_seconds(cost.build().ops, spec, prior).seconds[:, 0]
    # The same plateau; what fills a tile of rows differs by a percent or two.
    assert grouped > 0.98 * dense - 1e-5


def test_the_delta_rule_takes_its_own_curve() -> None:
    cost = CostBuilder()
    cost.op(
        "kda", OpKind.ATTENTION, Phase.FORWARD, dtype="bf16", m=8192, n=8192, k=128, batch=96,
        flops=8192 * 96 * 6 * 128 * 128, kernel="chunk_kda",
    )  # fmt: skip
    found = op_seconds(cost.build().ops, H100, PRIOR)
    assert found.assumptions == ()
    # FlashKDA's table on an H20 (fla's kernel, 96 heads): 4.84 ms; an H100 is no slower.
    assert 2e-3 < found.seconds[0, 0] < 4.84e-3


def test_curves_without_variants_still_price_everything() -> None:
    plain = Calibration(
        id="c", created="", source="t",
        curves=(
            EfficiencyCurve(kind="attention", dtype="bf16", max_efficiency=0.5),
            EfficiencyCurve(kind="memory_bound", dtype="bf16"),
        ),
    )  # fmt: skip
    assert op_seconds(_attention(64), H100, plain).assumptions == ()
