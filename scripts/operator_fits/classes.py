"""The curves of one GPU that has tables: which points, which forms, and what is added to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from flopwright.simulator.calibration.model import EfficiencyCurve
from flopwright.simulator.operators.variants import PEAK_OF
from flopwright.spec.cluster import GpuSpec
from operator_fits import tables
from operator_fits.robust import Fit, Limits, fit
from operator_fits.tables import Points

# Clocks of long runs over short ones of the same engine and shapes (m, n, k from 4096), bf16:
# 1.073 on an H200; 1.124 and 1.107 on a B200; 1.098 on a GB200. Parts without such runs take
# those of the nearest of these.
SUSTAINED: Final = {"hopper": 0.93, "b200": 0.895, "gb200": 0.91}
# A fit of few scalars to public training runs: attention of training stacks against these
# serving kernels; its backward rate against its forward rate; element-wise operators.
TRAINING_ATTENTION: Final = 0.74
BACKWARD_RATE: Final = 1 / 1.4
TRAINING_STREAM: Final = 0.61

# Best published products with one scale a tensor over the best bf16 ones (ml-engineering): 1.77,
# 1.83 and 1.85 on Hopper parts; 1.97, 1.90 and 1.98 on Blackwell ones. The fp8 table is of one
# scale a token, with the cast inside, and slower than training stacks show.
TENSOR_FP8_OVER_BF16: Final = {
    "h100_sxm": 1.82, "h200_sxm": 1.82, "b200_sxm": 1.95, "b300_sxm": 1.95,
    "gb200": 1.95, "gb300": 1.95,
}  # fmt: skip

_BASE = ("floor_s", "max_efficiency", "memory_efficiency")
_SIDES = ("half_m", "half_k", "half_n")
_DECLINE = ("decline_flops", "decline_power")
# Kernels of a mixture-of-experts layer that share the floor of its time.
_LAYER_KERNELS = 5
# A table that mixes kernels so much is no class; the next nearest curve is better.
_HOPELESS_P90 = 0.5


def _limits(gpu: GpuSpec, dtype: str, ceiling: float = 1.0) -> Limits:
    peaks = {str(k): v for k, v in gpu.peak_flops_per_s.items()}
    return Limits(peaks[PEAK_OF.get(dtype, dtype)], gpu.hbm_bytes_per_s, ceiling)


def _finish(
    found: Fit, points: Points, sides: str, source: str, **changes: Any
) -> EfficiencyCurve:
    domain = {
        side: (
            float(min(getattr(p, side).min() for p in points.parts)),
            float(max(getattr(p, side).max() for p in points.parts)),
        )
        for side in sides
    }
    held = {
        f"{form}_{name}" if form != "taken" else name: round(value, 4)
        for form, pair in found.errors.items()
        for name, value in zip(("median", "p90"), pair, strict=True)
    }
    return found.curve.model_copy(
        update={
            "residual_log": found.residual_log,
            "points": found.points,
            "held_out": held,
            "domain": domain,
            "source": source,
            **changes,
        }
    )


def gemm_curves(folder: Path, gpu: GpuSpec, table: str, sustained: float) -> list[EfficiencyCurve]:
    """Returns the curves of dense products, one a format."""
    curves = []
    for dtype in ("bf16", "fp8", "fp8_block", "nvfp4"):
        if dtype == "fp8" and table in TENSOR_FP8_OVER_BF16:
            curves.append(_tensor_fp8(curves[0], TENSOR_FP8_OVER_BF16[table]))
            continue
        points = tables.gemm(folder, table, dtype)
        if not len(points.seconds):
            continue
        beside = () if dtype == "bf16" else ("beside_efficiency",)
        forms = {
            "flat": _BASE + beside,
            "smooth": _BASE + _SIDES + beside,
            "decline": _BASE + _SIDES + beside + _DECLINE,
        }
        template = EfficiencyCurve(kind="gemm", dtype=dtype)
        found = fit(template, forms, points, _limits(gpu, dtype))
        cast = "" if dtype == "bf16" else "; the cast of its input taken out of the times"
        curves.append(
            _finish(
                found, points, "mkn", sustained=sustained,
                source=f"{dtype} GEMM table{cast}; gradients of both sides assumed as fast; "
                f"sustained: long against short runs",
            )
        )  # fmt: skip
    return curves


def _tensor_fp8(bf16: EfficiencyCurve, ratio: float) -> EfficiencyCurve:
    """Returns the curve of products with one scale a tensor, by the ratio to bf16 ones.

    What fills the pipeline along k takes the same time, which is twice the work.
    """
    return bf16.model_copy(
        update={
            "dtype": "fp8",
            "max_efficiency": _three(bf16.max_efficiency * ratio / 2),
            "half_k": _three(bf16.half_k * 2),
            "decline_flops": _three(bf16.decline_flops * 2),
            "residual_log": _three(float(np.hypot(bf16.residual_log, 0.1))),
            "points": 0,
            "held_out": {},
            "source": f"bf16 curve at {ratio} times its rate: best published products with one "
            "scale a tensor, casts not in it",
        }
    )


def _three(value: float) -> float:
    return float(f"{value:.3g}")


def grouped_curves(
    folder: Path, gpu: GpuSpec, table: str, dense: list[EfficiencyCurve]
) -> tuple[list[EfficiencyCurve], float]:
    """Returns the curves of grouped products and the permutes' share of the bandwidth."""
    curves, permutes = [], 1.0
    hopper = table in ("h100_sxm", "h200_sxm")
    for dtype in ("bf16", "fp8", "fp8_block", "nvfp4"):
        product = next((c for c in dense if c.dtype == dtype), dense[0])
        sglang = table == "a100_sxm" or (hopper and dtype == "fp8_block")
        engine = "sglang" if sglang else "trtllm"
        points = tables.grouped(folder, table, dtype, engine, "balanced")
        if len(points.seconds) < 100:
            continue
        found = fit(
            _grouped_template(product, dtype, free=table == "a100_sxm"),
            _grouped_forms(free=table == "a100_sxm"),
            points,
            _limits(gpu, dtype, product.max_efficiency),
        )
        if dtype == "bf16":
            permutes = found.beside_efficiency
        curves.append(
            _finish(
                found, points, "mkn", sustained=dense[0].sustained,
                floor_s=_three(found.curve.floor_s / _LAYER_KERNELS),
                source=f"{dtype} balanced MoE table ({engine}), m the rows of an expert; routing, "
                "permutes and activation taken out at a share of the bandwidth of their own; "
                "plateau of the dense product (the A100's is free); a fifth of a layer's floor",
            )
        )  # fmt: skip
    return curves, permutes


def _grouped_template(product: EfficiencyCurve, dtype: str, *, free: bool) -> EfficiencyCurve:
    """Returns what a grouped curve takes from the dense one.

    Published grouped and dense products of the same sides agree to 5 % from 4,096 rows an
    expert on (DeepGEMM), so that only the rows of an expert are left to fit. The A100's table
    is of another, slower kernel, whose level is free.
    """
    keep = {"decline_flops", "decline_power"} | (set() if free else {"max_efficiency", "half_n"})
    return EfficiencyCurve.model_validate(
        {"kind": "grouped_gemm", "dtype": dtype, **{k: getattr(product, k) for k in keep}}
        | ({} if free else {"half_k": product.half_k})
    )


def _grouped_forms(*, free: bool) -> dict[str, tuple[str, ...]]:
    level = ("max_efficiency",) if free else ()
    base = ("floor_s", "memory_efficiency", "beside_efficiency", *level)
    return {"flat": base, "rows": (*base, "half_m")}


def attention_curves(
    folder: Path, gpu: GpuSpec, table: str, share: float
) -> list[EfficiencyCurve]:
    """Returns the curves of attention by mask and head width, forward and backward."""
    wanted = [
        ("gqa", "bf16", 64), ("gqa", "bf16", 128), ("gqa", "fp8", 128),
        ("mla", "bf16", 192), ("full", "bf16", 64),
    ]  # fmt: skip
    curves = []
    for form, dtype, width in wanted:
        if form == "full" and table == "gb300":  # a fallback kernel was timed there
            continue
        points = tables.attention(folder, table, form, dtype, width)
        if len(points.seconds) < 100:
            continue
        base = ("floor_s", "max_efficiency")
        forms = {
            "flat": base,
            "smooth": (*base, "half_n"),
            "rows": (*base, "half_n", "half_rows"),
        }
        template = EfficiencyCurve(
            kind="attention", dtype=dtype, head_dim=width, causal=form != "full",
            memory_efficiency=share,
        )  # fmt: skip
        found = fit(template, forms, points, _limits(gpu, dtype))
        if found.errors["taken"][1] > _HOPELESS_P90:
            continue
        words = {"gqa": "causal prefill", "mla": "latent prefill", "full": "encoder"}[form]
        source = f"{dtype} {words} table, width {width}; sustained: training kernels against these"
        curve = _finish(found, points, "mn", source, sustained=TRAINING_ATTENTION)
        curves.append(curve)
        if dtype == "bf16":
            curves.append(_backward(curve))
    return curves


def _backward(forward: EfficiencyCurve) -> EfficiencyCurve:
    return forward.model_copy(
        update={
            "phase": "backward",
            "max_efficiency": float(f"{forward.max_efficiency * BACKWARD_RATE:.3g}"),
            "points": 0,
            "held_out": {},
            "residual_log": float(f"{np.hypot(forward.residual_log, 0.15):.3g}"),
            "source": "no table: forward rate over 1.4, as public training runs and cuDNN's "
            "figures have it (1.22 to 1.46)",
        }
    )


def byte_curves(
    folder: Path, gpu: GpuSpec, table: str, share: float, permutes: float
) -> list[EfficiencyCurve]:
    """Returns the curves of what is bound by bytes, and the delta rule's."""
    seed = {"dtype": "bf16", "max_efficiency": 1.0, "floor_s": 3e-6, "residual_log": 0.25}
    plain = EfficiencyCurve(
        kind="memory_bound", memory_efficiency=share, **seed,
        source="no table: share of the bandwidth that fits element-wise operators of public "
        "training runs, no more than the GEMM table streams",
    )  # fmt: skip
    curves = [
        plain,
        plain.model_copy(
            update={
                "family": "permute",
                "memory_efficiency": float(f"{min(permutes, share):.3g}"),
                "source": "what the bf16 MoE table leaves beside its products, no more than "
                "other memory-bound operators",
            }
        ),
        plain.model_copy(
            update={
                "kind": "optimizer",
                "dtype": "fp32",
                "source": "no table: as memory_bound; fused updates stream their operands once",
            }
        ),
    ]
    points = tables.quantize(folder, table)
    if len(points.seconds):
        template = EfficiencyCurve(kind="quantize", dtype="bf16", max_efficiency=1.0)
        found = fit(
            template, {"stream": ("floor_s", "memory_efficiency")}, points, _limits(gpu, "bf16")
        )
        curves.append(_finish(found, points, "", "table of casts to fp8 with a known scale"))
    else:
        curves.append(plain.model_copy(update={"kind": "quantize"}))
    points = tables.kda(folder, table)
    if len(points.seconds) >= 100:
        template = EfficiencyCurve(kind="kda", dtype="bf16", memory_efficiency=1.0)
        forms = {"flat": ("floor_s", "max_efficiency")}
        found = fit(template, forms, points, _limits(gpu, "bf16"))
        words = "table of the chunked delta rule, at 6 d_k d_v FLOPs a token and head"
        curve = _finish(found, points, "", words)
        curves += [curve, _backward(curve)]
    return curves


def curves_of(folder: Path, gpu: GpuSpec, table: str, sustained: float) -> list[EfficiencyCurve]:
    """Returns all curves of a GPU with tables."""
    dense = gemm_curves(folder, gpu, table, sustained)
    share = float(f"{min(TRAINING_STREAM, dense[0].memory_efficiency):.3g}")
    grouped, permutes = grouped_curves(folder, gpu, table, dense)
    curves = dense + grouped
    if any(c.dtype == "nvfp4" for c in dense):  # Blackwell multiplies MX formats
        curves += [
            c.model_copy(
                update={
                    "dtype": "mxfp8",
                    "source": f"as fp8_block: {c.source}",
                    "points": 0,
                    "held_out": {},
                }
            )
            for c in curves
            if c.dtype == "fp8_block"
        ]
    curves += attention_curves(folder, gpu, table, share)
    return curves + byte_curves(folder, gpu, table, share, permutes)
