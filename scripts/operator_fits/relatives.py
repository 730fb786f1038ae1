"""Curves of GPUs without tables, from the nearest relative that has them, by a stated rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from flopwright.simulator.calibration.model import EfficiencyCurve


@dataclass(frozen=True)
class Relative:
    """Where a GPU's curves come from.

    Attributes:
        of: a GPU of the catalog with tables, or one of TABLES_ONLY.
        why: the rule, in words.
        rate: factor on every efficiency of products and attention.
        steady: whether no clock falls with work (little power for each FLOP of the peak).
        same_silicon: whether it computes as its relative does, so that nothing is less sure.
    """

    of: str
    why: str
    rate: float = 1.0
    steady: bool = False
    same_silicon: bool = False


# Best published GEMM (kernels and links collected from ml-engineering), share of these peaks.
_H100_BEST = 794.5 / 989
_B200_BEST = 1745.0 / 2250
_POWER_500_W = (500 / 700) ** (1 / 3)

RELATIVES: Final = {
    "a100_sxm_40gb": Relative("a100_sxm_80gb", "the same chip", same_silicon=True),
    "a800_sxm_80gb": Relative("a100_sxm_80gb", "an A100 with less NVLink", same_silicon=True),
    "h800_sxm": Relative("h100_sxm", "an H100 with less NVLink", same_silicon=True),
    "gh200": Relative("h100_sxm", "the chip of an H100 with faster memory: its shares"),
    "h100_96gb_hbm2e": Relative(
        "h100_sxm",
        "shares of an H100; at 500 W of its 700 clocks fall with the cube root of the power",
        rate=_POWER_500_W,
    ),
    "h20": Relative(
        "h100_sxm",
        "shares of an H100 without the fall of clocks: a seventh of its peak at 400 W",
        steady=True,
    ),
    "mi300x": Relative(
        "h100_sxm",
        "datasheet prediction: an H100's shares times the ratio of the best published GEMMs",
        rate=668.4 / 1307.4 / _H100_BEST,
    ),
    "mi325x": Relative(
        "h100_sxm",
        "datasheet prediction: an H100's shares times the ratio of the best published GEMMs",
        rate=784.9 / 1307.4 / _H100_BEST,
    ),
    "mi355x": Relative(
        "b200",
        "datasheet prediction: a B200's shares times the ratio of the best published GEMMs",
        rate=1565.0 / 2516.6 / _B200_BEST,
    ),
    "rtx_4090": Relative(
        "rtx_pro_6000_server",
        "shares of the RTX PRO 6000, the table with the nearest power for each FLOP of the peak",
        steady=True,
    ),
    "a6000": Relative(
        "rtx_pro_6000_server",
        "shares of the RTX PRO 6000, the table with the nearest power for each FLOP of the peak",
        steady=True,
    ),
    "cuda": Relative("h100_sxm", "no table for this GPU: shares as on an H100"),
    "rocm": Relative(
        "h100_sxm",
        "no table for this GPU: an H100's shares times the ratio of the best published GEMMs",
        rate=668.4 / 1307.4 / _H100_BEST,
    ),
}
# What the step to a relative adds to the spread, in log.
_STEP = 0.1
_SCALED = frozenset({"gemm", "grouped_gemm", "attention", "kda"})


def derived(
    relative: Relative, curves: list[EfficiencyCurve], formats: set[str]
) -> list[EfficiencyCurve]:
    """Returns the relative's curves under its rule.

    Args:
        relative: the rule.
        curves: those of the GPU it is related to.
        formats: formats that the datasheet has a peak for; curves of others are left out.
    """
    if relative.same_silicon:
        return curves
    return [_derived(relative, c) for c in curves if _usable(c, formats)]


def _usable(curve: EfficiencyCurve, formats: set[str]) -> bool:
    needs = {"fp8": "fp8", "fp8_block": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}.get(curve.dtype)
    return needs is None or needs in formats


def _derived(relative: Relative, curve: EfficiencyCurve) -> EfficiencyCurve:
    changes: dict[str, object] = {
        "points": 0,
        "held_out": {},
        "residual_log": float(f"{np.hypot(curve.residual_log, _STEP):.3g}"),
        "source": f"of {relative.of}: {curve.source}",
    }
    if curve.kind in _SCALED:
        rate = min(curve.max_efficiency * relative.rate, 1.0)
        changes["max_efficiency"] = float(f"{rate:.3g}")
    if relative.steady:
        changes |= {"decline_power": 0.0, "decline_flops": 1e12}
        if curve.kind in {"gemm", "grouped_gemm"}:
            changes["sustained"] = 1.0
    return curve.model_copy(update=changes)
