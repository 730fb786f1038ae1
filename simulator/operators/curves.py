"""Which efficiency curve prices an operator: exact, or a fallback that is named."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from flopwright.errors import InputError, Violation
from flopwright.simulator.calibration.model import Calibration, EfficiencyCurve
from flopwright.simulator.operators.variants import PEAK_OF, Variant
from flopwright.spec.cluster import GpuSpec

# A class without a curve of its own borrows that of the class whose limits it shares.
_BORROWS: Final = {
    "grouped_gemm": "gemm",
    "attention": "gemm",
    "kda": "memory_bound",
    "optimizer": "memory_bound",
    "memory_bound": "optimizer",
    "quantize": "memory_bound",
}
# Classes bound by bytes: the dtype decides how many, not how fast.
_BYTES_DECIDE: Final = frozenset({"memory_bound", "optimizer", "quantize"})
# Whose curve a format takes before that of any other format.
_NEAREST_FORMATS: Final = {
    "mxfp8": ("fp8_block", "fp8"),
    "fp8_block": ("mxfp8", "fp8"),
    "fp8": ("fp8_block", "mxfp8"),
    "nvfp4": ("mxfp4", "mxfp8", "fp8_block", "fp8"),
    "mxfp4": ("nvfp4", "mxfp8", "fp8_block", "fp8"),
}


@dataclass(frozen=True, slots=True)
class ResolvedCurve:
    """A curve with the peak and bandwidth it works against.

    Attributes:
        peak_flops_per_s: what efficiency 1 means; bytes_per_s: effective memory bandwidth.
        assumption: what was assumed to price the operator with it; "" where it is its own.
    """

    curve: EfficiencyCurve
    peak_flops_per_s: float
    bytes_per_s: float
    floor_s: float
    assumption: str


def resolve_curve(calibration: Calibration, gpu: GpuSpec, variant: Variant) -> ResolvedCurve:
    """Returns the curve for an operator class.

    Search order: the class at this dtype and phase, at this dtype forward, at another
    dtype, the class it borrows from, the defaults of EfficiencyCurve. The first two are the
    class's own; every other step is named in `assumption`. Among attention curves the one
    of the same mask and the nearest head width is taken, among memory-bound ones that of
    the family, else the class's.

    Raises:
        InputError: the GPU has no peak for the dtype.
    """
    kind = variant.kind
    # A measured floor holds the launch already, replayed graphs have none; a prior's floor is
    # the kernel alone.
    launch_s = 0.0 if calibration.stack_id or calibration.graphs else gpu.launch_floor_s
    for name in (kind, _BORROWS.get(kind)):
        found = None if name is None else _pick(calibration, name, variant)
        if found is not None:
            return _resolve(found, gpu, variant, launch_s)
    bare = EfficiencyCurve.model_validate({"kind": kind, "dtype": variant.dtype})
    resolved = _resolve(bare, gpu, variant, gpu.launch_floor_s)
    share, stream = bare.max_efficiency, bare.memory_efficiency
    note = f"{kind} has no curve: {share:.0%} of the peak, {stream:.0%} of the bandwidth assumed"
    return replace(resolved, assumption=note)


def _pick(calibration: Calibration, kind: str, variant: Variant) -> EfficiencyCurve | None:
    near = _NEAREST_FORMATS.get(variant.dtype, ())

    def distance(c: EfficiencyCurve) -> tuple[object, ...]:
        other = near.index(c.dtype) + 1 if c.dtype in near else len(near) + 1
        return (
            0 if c.dtype == variant.dtype else other,
            c.phase != variant.phase,
            c.phase != "forward",
            c.family != variant.family,
            c.family != "",
            c.causal != variant.causal,
            _widths_apart(c.head_dim, variant.head_dim),
            c.dtype,
        )

    mine = [c for c in calibration.curves if c.kind == kind]
    return min(mine, key=distance, default=None)


def _widths_apart(a: int, b: int) -> float:
    return abs(math.log(a / b)) if a and b else 0.0


def _resolve(
    curve: EfficiencyCurve, gpu: GpuSpec, variant: Variant, launch_s: float
) -> ResolvedCurve:
    kind, dtype = variant.kind, variant.dtype
    notes = []
    if curve.kind != kind:
        notes.append(f"{kind} is priced by the {curve.kind} curve")
    if curve.dtype != dtype and not (kind in _BYTES_DECIDE and curve.source):
        notes.append(f"{kind} in {dtype} is priced by the {curve.dtype} curve")
    if _widths_apart(curve.head_dim, variant.head_dim) > math.log(1.6):
        notes.append(
            f"{kind} of width {variant.head_dim} is priced by the curve of {curve.head_dim}"
        )
    return ResolvedCurve(
        curve=curve,
        peak_flops_per_s=_peak(curve, gpu, kind, dtype),
        bytes_per_s=curve.bytes_per_s or curve.memory_efficiency * gpu.hbm_bytes_per_s,
        floor_s=max(curve.floor_s, launch_s),
        assumption="; ".join(notes),
    )


def _peak(curve: EfficiencyCurve, gpu: GpuSpec, kind: str, dtype: str) -> float:
    datasheet = {str(k): v for k, v in gpu.peak_flops_per_s.items()}
    wanted = PEAK_OF.get(dtype, dtype)
    if curve.dtype == dtype and curve.peak_flops_per_s is not None:
        return curve.peak_flops_per_s
    if wanted in datasheet:
        return datasheet[wanted]
    if kind in _BYTES_DECIDE:
        return curve.peak_flops_per_s or max(datasheet.values())
    raise InputError(
        Violation(
            field=f"gpu.peak_flops.{wanted}",
            rule=f"{gpu.name} has no peak for {dtype}, which the model computes {kind} in",
            nearest_fix=f"known: {', '.join(sorted(datasheet))}",
        )
    )
