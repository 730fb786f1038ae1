"""Seconds of every operator row: a roofline under an efficiency that depends on the shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array, OpTable, Phase
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.operators.curves import ResolvedCurve, resolve_curve
from flopwright.simulator.operators.domain import outside
from flopwright.simulator.operators.forms import efficiency
from flopwright.simulator.operators.variants import Variant, variant_of
from flopwright.spec.cluster import GpuSpec


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Seconds of a table's rows.

    Attributes:
        seconds: (rows, candidates), all runs of a row together.
        assumptions: what had to be assumed about curves, extrapolations among them.
    """

    seconds: Array
    assumptions: tuple[str, ...]


def op_seconds(ops: OpTable, gpu: GpuSpec, calibration: Calibration) -> OpTimes:
    """Returns the seconds of every row.

    One run takes floor + max(flops / (peak * efficiency), bytes / bandwidth): never less
    than the roofline (Williams et al. 2009) of the peak and bandwidth the curve stands on.
    Inside a step each also takes the calibration's call_s.

    Raises:
        InputError: a row of a class or dtype that nothing prices.
    """
    seconds = np.zeros(ops.m.shape)
    notes: dict[str, None] = {}
    groups: dict[Variant, list[int]] = {}
    for row in range(len(ops)):
        groups.setdefault(variant_of(ops, row), []).append(row)
    for variant, members in groups.items():
        curve = resolve_curve(calibration, gpu, variant)
        rows = np.array(members)
        for note in (curve.assumption, outside(curve.curve, ops, rows)):
            if note:
                notes[note] = None
        once = _once(ops, rows, curve)
        if calibration.call_s:
            inside = (ops.phase[rows] != Phase.STEP)[:, None]
            once = once + np.where(inside, calibration.call_s.get(variant.phase, 0.0), 0.0)
        seconds[rows] = np.where(ops.count[rows] > 0, once * ops.count[rows], 0.0)
    return OpTimes(seconds=seconds, assumptions=tuple(notes))


def _once(ops: OpTable, rows: NDArray[np.intp], curve: ResolvedCurve) -> Array:
    """Returns the seconds of one run of each row."""
    m, flops = ops.m[rows], ops.flops[rows]
    all_rows = ops.batch[rows] * m if curve.curve.half_rows > 0 else None
    # A shape with a zero side has zero FLOPs too; it costs its bytes.
    with np.errstate(divide="ignore", invalid="ignore"):
        share = efficiency(curve.curve, m, ops.k[rows], ops.n[rows], rows=all_rows, flops=flops)
        compute = np.where(flops > 0, flops / (curve.peak_flops_per_s * share), 0.0)
    memory = (ops.read_bytes[rows] + ops.written_bytes[rows]) / curve.bytes_per_s
    return np.asarray(curve.floor_s + np.maximum(compute, memory))
