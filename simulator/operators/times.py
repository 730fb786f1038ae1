"""Seconds of every operator row: a roofline under an efficiency that depends on the shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopwright.ops import Array, OpKind, OpTable, Phase
from flopwright.simulator.calibration.model import Calibration, EfficiencyCurve
from flopwright.simulator.operators.curves import resolve_curve
from flopwright.spec.cluster import GpuSpec

_KIND_NAMES = {
    OpKind.GEMM: "gemm",
    OpKind.GROUPED_GEMM: "grouped_gemm",
    OpKind.ATTENTION: "attention",
    OpKind.MEMORY_BOUND: "memory_bound",
    OpKind.OPTIMIZER: "optimizer",
    OpKind.QUANTIZE: "quantize",
}
_BACKWARD = frozenset({Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT})


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Seconds of a table's rows.

    Attributes:
        seconds: (rows, candidates), all runs of a row together.
        assumptions: what had to be assumed about curves.
    """

    seconds: Array
    assumptions: tuple[str, ...]


def efficiency(curve: EfficiencyCurve, m: Array, k: Array, n: Array) -> Array:
    """Returns the share of the peak that the curve's kernel class reaches at a shape.

    max_efficiency * m/(m+half_m) * k/(k+half_k) * n/(n+half_n), between 0 and 1.
    """
    share = np.full(np.broadcast_shapes(m.shape, k.shape, n.shape), curve.max_efficiency)
    for size, half in ((m, curve.half_m), (k, curve.half_k), (n, curve.half_n)):
        if half > 0:
            share = share * (size / (size + half))
    return share


def op_seconds(ops: OpTable, gpu: GpuSpec, calibration: Calibration) -> OpTimes:
    """Returns the seconds of every row.

    One run takes floor + max(flops / (peak * efficiency), bytes / bandwidth): never less
    than the roofline (Williams et al. 2009) of the peak and bandwidth the curve stands on.

    Raises:
        InputError: a row of a class or dtype that nothing prices.
    """
    seconds = np.zeros(ops.m.shape)
    notes: dict[str, None] = {}
    groups: dict[tuple[str, str, str], list[int]] = {}
    for row in range(len(ops)):
        phase = "backward" if Phase(ops.phase[row]) in _BACKWARD else "forward"
        key = (_KIND_NAMES[OpKind(ops.kind[row])], ops.dtype[row], phase)
        groups.setdefault(key, []).append(row)
    for (kind, dtype, phase), members in groups.items():
        curve = resolve_curve(calibration, gpu, kind, dtype, phase)
        if curve.assumption:
            notes[curve.assumption] = None
        rows = np.array(members)
        share = efficiency(curve.curve, ops.m[rows], ops.k[rows], ops.n[rows])
        # A shape with a zero side has zero FLOPs too; it costs its bytes.
        with np.errstate(divide="ignore", invalid="ignore"):
            compute = np.where(
                ops.flops[rows] > 0, ops.flops[rows] / (curve.peak_flops_per_s * share), 0.0
            )
        memory = (ops.read_bytes[rows] + ops.written_bytes[rows]) / curve.bytes_per_s
        once = curve.floor_s + np.maximum(compute, memory)
        seconds[rows] = np.where(ops.count[rows] > 0, once * ops.count[rows], 0.0)
    return OpTimes(seconds=seconds, assumptions=tuple(notes))
