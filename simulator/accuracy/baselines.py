"""What much simpler predictors score on the same runs: a refinement has to beat them.

"constant MFU": one share of the peak for each (processor, format of the products), the median
of the runs it may learn from. "flat GEMM": the simulator with matrix products at one rate,
whatever their shape; its stacks are fitted like the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from flopwright.ops import Array
from flopwright.simulator.accuracy.run_of_row import PublishedRun
from flopwright.simulator.calibration.model import Calibration
from flopwright.spec.flops import model_flops_per_token

CONSTANT_MFU: Final = "one share of the peak for each processor and format of the products"
FLAT_GEMM: Final = "the simulator with matrix products at one rate whatever their shape"
_PEAK_OF_RECIPE: Final = {"nvfp4": "fp4", "same": ""}
_PRODUCTS: Final = frozenset({"gemm", "grouped_gemm"})
# Sides of the product whose rate the flat baseline takes for all.
_LARGE: Final = 8192.0


def mfu_key(run: PublishedRun) -> str:
    """Returns what a constant MFU belongs to: "processor format"."""
    precision = run.scenario.workload.precision
    return f"{run.gpu} {precision.compute if precision.gemm == 'same' else precision.gemm}"


def ideal_step_s(run: PublishedRun) -> float:
    """Returns the step time at the dense peak of the products' format."""
    work, gpu = run.scenario.workload, run.scenario.cluster.node.gpu
    wanted = _PEAK_OF_RECIPE.get(work.precision.gemm, "fp8") or work.precision.compute
    peaks = {str(k): v for k, v in gpu.peak_flops_per_s.items()}
    peak = peaks.get(wanted) or peaks.get(work.precision.compute) or max(peaks.values())
    flops = work.tokens_per_step * model_flops_per_token(run.scenario.model, work.seq_len)
    return flops / (peak * run.num_gpus)


def constant_mfu(runs: Sequence[PublishedRun]) -> dict[str, float]:
    """Returns the median share of the peak by mfu_key, and over all runs under ""."""
    found: dict[str, list[float]] = {"": []}
    for run in runs:
        if run.measured_step_s is not None:
            share = ideal_step_s(run) / run.measured_step_s
            found.setdefault(mfu_key(run), []).append(share)
            found[""].append(share)
    return {key: float(np.median(shares)) for key, shares in found.items() if shares}


def constant_mfu_step_s(run: PublishedRun, shares: Mapping[str, float]) -> float:
    """Returns the step time of a run at its constant MFU, else at that of all runs."""
    return ideal_step_s(run) / shares.get(mfu_key(run), shares[""])


def held_out_mfu_step_s(runs: Sequence[PublishedRun], folds: Sequence[str]) -> Array:
    """Returns the constant-MFU step time of each run, learnt from the runs of other folds.

    NaN where there is no other fold.
    """
    ideal = np.array([ideal_step_s(run) for run in runs])
    share = ideal / np.array([run.measured_step_s or np.nan for run in runs])
    keys, labels = np.array([mfu_key(run) for run in runs]), np.array(folds)
    out = np.zeros(len(runs))
    for name in dict.fromkeys(folds):
        mine, others = labels == name, labels != name
        everywhere = np.nanmedian(share[others]) if others.any() else np.nan
        for key in dict.fromkeys(keys[mine].tolist()):
            known = share[others & (keys == key)]
            level = np.nanmedian(known) if len(known) else everywhere
            out[mine & (keys == key)] = level
    return np.asarray(ideal / out)


def with_flat_products(calibration: Calibration) -> Calibration:
    """Returns a calibration whose matrix products run at the rate of a large one.

    A curve saturates in m, k and n; the flat one takes the share at 8192 in each for all.
    """
    curves = tuple(
        curve.model_copy(
            update={
                "max_efficiency": curve.max_efficiency * _share(curve.half_m)
                * _share(curve.half_k) * _share(curve.half_n),
                "half_m": 0.0,
                "half_k": 0.0,
                "half_n": 0.0,
            }
        )
        if curve.kind in _PRODUCTS
        else curve
        for curve in calibration.curves
    )  # fmt: skip
    return calibration.model_copy(update={"curves": curves})


def _share(half: float) -> float:
    return _LARGE / (_LARGE + half)
