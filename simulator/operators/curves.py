"""Which efficiency curve prices an operator: exact, or a fallback that is named."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from flopwright.errors import InputError, Violation
from flopwright.simulator.calibration.model import Calibration, EfficiencyCurve
from flopwright.spec.cluster import GpuSpec

# A class without a curve of its own borrows that of the class whose limits it shares.
_BORROWS: Final = {
    "grouped_gemm": "gemm",
    "attention": "gemm",
    "optimizer": "memory_bound",
    "memory_bound": "optimizer",
    "quantize": "memory_bound",
}
# Classes bound by bytes: the dtype decides how many, not how fast.
_BYTES_DECIDE: Final = frozenset({"memory_bound", "optimizer", "quantize"})


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


def resolve_curve(
    calibration: Calibration, gpu: GpuSpec, kind: str, dtype: str, phase: str
) -> ResolvedCurve:
    """Returns the curve for an operator class.

    Search order: the class at this dtype and phase, at this dtype forward, at another
    dtype, the class it borrows from, the defaults of EfficiencyCurve. The first two are the
    class's own; every other step is named in `assumption`.

    Raises:
        InputError: the GPU has no peak for the dtype.
    """
    for name in (kind, _BORROWS.get(kind)):
        if name is None:
            continue
        found = _pick(calibration, name, dtype, phase)
        if found is not None:
            # A measured floor holds the launch already; a prior's is the kernel alone.
            launch_s = 0.0 if calibration.stack_id else gpu.launch_floor_s
            return _resolve(found, gpu, kind, dtype, launch_s)
    bare = EfficiencyCurve.model_validate({"kind": kind, "dtype": dtype})
    resolved = _resolve(bare, gpu, kind, dtype, gpu.launch_floor_s)
    share, stream = bare.max_efficiency, bare.memory_efficiency
    note = f"{kind} has no curve: {share:.0%} of the peak, {stream:.0%} of the bandwidth assumed"
    return replace(resolved, assumption=note)


def _pick(calibration: Calibration, kind: str, dtype: str, phase: str) -> EfficiencyCurve | None:
    mine = [c for c in calibration.curves if c.kind == kind]
    mine.sort(key=lambda c: (c.dtype != dtype, c.phase != phase, c.phase != "forward", c.dtype))
    return mine[0] if mine else None


def _resolve(
    curve: EfficiencyCurve, gpu: GpuSpec, kind: str, dtype: str, launch_s: float
) -> ResolvedCurve:
    notes = []
    if curve.kind != kind:
        notes.append(f"{kind} is priced by the {curve.kind} curve")
    if curve.dtype != dtype:
        notes.append(f"{kind} in {dtype} is priced by the {curve.dtype} curve")
    datasheet = {str(k): v for k, v in gpu.peak_flops_per_s.items()}
    if curve.dtype == dtype and curve.peak_flops_per_s is not None:
        peak = curve.peak_flops_per_s
    elif dtype in datasheet:
        peak = datasheet[dtype]
    elif kind in _BYTES_DECIDE:
        peak = curve.peak_flops_per_s or max(datasheet.values())
    else:
        raise InputError(
            Violation(
                field=f"gpu.peak_flops.{dtype}",
                rule=f"{gpu.name} has no peak for {dtype}, which the model computes {kind} in",
                nearest_fix=f"known: {', '.join(sorted(datasheet))}",
            )
        )
    return ResolvedCurve(
        curve=curve,
        peak_flops_per_s=peak,
        bytes_per_s=curve.bytes_per_s or curve.memory_efficiency * gpu.hbm_bytes_per_s,
        floor_s=max(curve.floor_s, launch_s),
        assumption="; ".join(notes),
    )
