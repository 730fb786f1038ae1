"""Efficiency curves of serving kernels: decode shapes, graph replay, narrow weights.

Training's curves (simulator/hardware/efficiency) are fitted for products of many rows; those
of `simulator/hardware/serving` are fitted to the same public tables with their small batches,
and hold what training never runs: attention of one query over a cache, routed experts of few
rows, all-reduces of a few kilobytes.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

import flopwright
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration, CollectiveCurve, EfficiencyCurve
from flopwright.simulator.operators.variants import PEAK_OF
from flopwright.spec.base import Spec
from flopwright.spec.cluster import GpuSpec
from flopwright.spec.formats import WeightFormat
from flopwright.spec.load import load_gpu
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import read_yaml

FOLDER: Final = Path(flopwright.__file__).parent / "simulator" / "hardware" / "serving"
# GPUs without tables of their own take the shares of a near relative on their own datasheet.
_RELATIVES: Final = {
    "h800_sxm": "h100_sxm",
    "h20": "h100_sxm",
    "h100_96gb_hbm2e": "h100_sxm",
    "gh200": "h200_sxm",
    "b300": "b200",
    "gb300": "gb200",
    "a800_sxm_80gb": "a100_sxm_80gb",
    "a100_sxm_40gb": "a100_sxm_80gb",
}
_DEFAULT: Final = "h100_sxm"
# Products whose weights alone are narrow compute in bf16.
WEIGHT_ONLY: Final = {"int4_wo": "bf16", "w4a16_mxfp4": "bf16", "w4a8_mxfp4": "fp8"}


class DecodeCurve(Spec):
    """Attention of new tokens over a cache: floor + row_s * rows + max(bytes, FLOPs).

    Attributes:
        row_s: seconds of every (sequence, cached head) beside its bytes: blocks of cache are
            read whole, and split work is put together.
        memory_efficiency: share of the datasheet's bandwidth on the cache's bytes.
        max_efficiency: share of the bf16 peak where FLOPs decide (latent attention).
    """

    kind: Literal["gqa", "mla", "kda"]
    kv_dtype: str
    head_dim: int = 0
    floor_s: NonNegativeFloat
    row_s: NonNegativeFloat = 0.0
    memory_efficiency: float = Field(gt=0, le=1)
    max_efficiency: float = Field(default=0.5, gt=0, le=1)
    residual_log: NonNegativeFloat = 0.0
    points: int = 0
    source: str = ""


class ExchangeCurve(Spec):
    """Low-latency exchange of tokens between experts: base + bytes over a share of the link."""

    near_base_s: NonNegativeFloat
    near_share: PositiveFloat
    far_base_s: NonNegativeFloat
    far_share: PositiveFloat
    residual_log: NonNegativeFloat = 0.0
    points: int = 0


class ServingCurves(Spec):
    """What serving kernels of one GPU reach; see the classes of the fields."""

    id: str
    source: str
    curves: tuple[EfficiencyCurve, ...] = ()
    decode: tuple[DecodeCurve, ...] = ()
    all_reduce: tuple[CollectiveCurve, ...] = ()
    exchange: ExchangeCurve | None = None

    @property
    def num_values(self) -> int:
        """Fitted numbers of the file."""
        fits = 6 * len(self.curves) + 4 * len(self.decode) + 2 * len(self.all_reduce)
        return fits + (4 if self.exchange else 0)


def serving_name(gpu: GpuSpec) -> str:
    """Returns whose serving curves a GPU takes."""
    if (FOLDER / f"{gpu.name}.yaml").is_file():
        return gpu.name
    return _RELATIVES.get(gpu.name, _DEFAULT)


@lru_cache(maxsize=16)
def _read(name: str) -> ServingCurves:
    return validate(ServingCurves, read_yaml(FOLDER / f"{name}.yaml"))


def serving_curves(gpu: GpuSpec) -> ServingCurves:
    """Returns the serving curves of a GPU, or those of its nearest relative with tables."""
    return _read(serving_name(gpu))


def product_dtype(weights: WeightFormat, gpu: GpuSpec) -> str:
    """Returns the dtype whose curve prices a product with weights of this format."""
    if weights.name == "block_fp8":
        return "fp8_block"
    if weights.name == "int4_g32":
        return "int4_wo"
    if weights.name == "mxfp4":
        return "w4a8_mxfp4" if "fp4" in {str(k) for k in gpu.peak_flops_per_s} else "w4a16_mxfp4"
    return weights.name


_known: dict[tuple[str, float, str, str], Calibration] = {}
_MAX_KNOWN: Final = 64


def slower_than_tables(gpu: GpuSpec, dtype: str) -> float:
    """Returns a GPU's peak over that of the one whose curves it takes, at most 1.

    What a product of few rows costs beside its FLOPs (weights read, waves that are not full)
    is no longer on a part with a smaller peak: it is worth fewer rows there.
    """
    name = serving_name(gpu)
    if name == gpu.name:
        return 1.0
    theirs = {str(k): v for k, v in load_gpu(name).peak_flops_per_s.items()}
    mine = {str(k): v for k, v in gpu.peak_flops_per_s.items()}
    return min(mine[dtype] / theirs.get(dtype, mine[dtype]), 1.0)


def kernel_calibration(gpu: GpuSpec, own: Calibration | None = None) -> Calibration:
    """Returns the curves that price an engine's operators on this GPU.

    The serving curves stand before those of the training prior, which give what they do not
    have (norms, casts). A calibration of the user's own replaces both, class by class.
    """
    key = (gpu.name, gpu.hbm_bytes_per_s, str(gpu.peak_flops_per_s), own.id if own else "")
    if key not in _known:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[key] = _kernel_calibration(gpu, own)
    return _known[key]


def _kernel_calibration(gpu: GpuSpec, own: Calibration | None) -> Calibration:
    prior = default_calibration(gpu)
    peaks = {str(k): v for k, v in gpu.peak_flops_per_s.items()}
    serving = []
    for curve in serving_curves(gpu).curves:
        base = WEIGHT_ONLY.get(curve.dtype, PEAK_OF.get(curve.dtype, curve.dtype))
        if base not in peaks:
            continue
        own_peak = {"peak_flops_per_s": peaks[base]} if curve.dtype in WEIGHT_ONLY else {}
        slower = slower_than_tables(gpu, base)
        serving.append(curve.model_copy(update={**own_peak, "half_m": curve.half_m * slower}))
    taken = {(c.kind, c.dtype, c.phase, c.head_dim) for c in serving}
    kept = [
        c.model_copy(update={"sustained": 1.0} if c.kind == "attention" else {})
        for c in prior.curves
        if (c.kind, c.dtype, c.phase, c.head_dim) not in taken
    ]
    curves = (*serving, *kept)
    if own is not None:
        mine = {(c.kind, c.dtype, c.phase) for c in own.curves}
        curves = (*own.curves, *(c for c in curves if (c.kind, c.dtype, c.phase) not in mine))
    return prior.model_copy(update={"curves": curves, "graphs": True, "collectives": ()})
