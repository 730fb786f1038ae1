"""Fits the efficiency curves that ship to public operator tables, and writes their files.

    python scripts/fit_operators.py FOLDER [--out DIR]

FOLDER holds gemm.parquet, attention.parquet, moe.parquet and other.parquet: operator timings
of NVIDIA AIConfigurator (Apache-2.0) in SI units. One YAML a GPU of the catalog is written,
with held-out errors of the form taken and of the plainer ones. The tables stay outside.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml
from operator_fits.classes import SUSTAINED, curves_of
from operator_fits.relatives import RELATIVES, Relative, derived

from flopwright.simulator.calibration.files import SHIPPED
from flopwright.simulator.calibration.model import EfficiencyCurve
from flopwright.spec.cluster import GpuSpec
from flopwright.spec.load import load_gpu

HEADER = """\
# Public prior of kernel efficiencies, written by scripts/fit_operators.py.
# Source: NVIDIA AIConfigurator (https://github.com/ai-dynamo/aiconfigurator),
# commit 095f58a51c4ca8e61b66ec108d86f223f8d559ce
# Licence: Apache-2.0, copyright NVIDIA CORPORATION & AFFILIATES
# changed: fitted. Its tables are serving kernels, forward only: the step from there to
# training kernels is named in each source.
"""
# Our GPU, the name of its tables, and whose long runs its clocks are taken from.
TABLES = {
    "a100_sxm_80gb": ("a100_sxm", "hopper"),
    "h100_sxm": ("h100_sxm", "hopper"),
    "h200_sxm": ("h200_sxm", "hopper"),
    "b200": ("b200_sxm", "b200"),
    "b300": ("b300_sxm", "b200"),
    "gb200": ("gb200", "gb200"),
    "gb300": ("gb300", "gb200"),
    "l40s": ("l40s", "hopper"),
}
# A part with tables that the catalog does not have: peaks and memory of its system file.
_RTX = GpuSpec.model_validate(
    {
        "name": "rtx_pro_6000_server",
        "peak_flops": {"bf16": "467.8 TFLOP/s", "fp8": "935.6 TFLOP/s", "fp4": "1871.2 TFLOP/s"},
        "hbm": "95.5 GiB",
        "hbm_bandwidth": "1792 GB/s",
        "sources": {"all": "system file of NVIDIA AIConfigurator"},
    }
)
_STEP = (
    "measured over predicted spreads by 0.155 in log over software stacks unseen in a fit to "
    "public runs, and some inside a stack"
)
_HIDDEN = {
    "ep_comm": (0.3, "best fit over published Megatron-Bridge MoE runs before release 26.06"),
    "dp_comm": (
        0.6,
        "best fit over published Megatron and NeMo runs that overlap the distributed optimizer",
    ),
}


def _text(name: str, source: str, curves: list[EfficiencyCurve], spread: float) -> str:
    twice = "" if spread <= 0.2 else f"{spread / 0.2:g} times that of a part with tables; "
    record = {
        "id": f"prior-{name}",
        "created": "2026-11-29",
        "source": source,
        "step_residual_log": spread,
        "hidden_share": {k: share for k, (share, _) in _HIDDEN.items()},
        "sources": {
            "step_residual_log": twice + _STEP,
            **{f"hidden_share.{k}": why for k, (_, why) in _HIDDEN.items()},
        },
        "curves": [c.model_dump(mode="json", exclude_defaults=True) for c in curves],
    }
    return HEADER + yaml.safe_dump(record, sort_keys=False, width=99, allow_unicode=True)


def _spread(relative: Relative) -> float:
    if relative.same_silicon:
        return 0.2
    return 0.4 if "no table" in relative.why or "datasheet" in relative.why else 0.25


def fitted_files(folder: Path, only: tuple[str, ...] = ()) -> dict[str, str]:
    """Returns the text of every efficiency file by name.

    Args:
        folder: where the tables are.
        only: GPUs with tables to fit; none means all of them and their relatives.
    """
    fitted, files = {}, {}
    for name, (table, clocks) in TABLES.items():
        if only and name not in only:
            continue
        fitted[name] = curves_of(folder, load_gpu(name), table, SUSTAINED[clocks])
        files[name] = _text(name, "operator tables of this GPU", fitted[name], 0.2)
    if only:
        return files
    fitted[_RTX.name] = curves_of(folder, _RTX, _RTX.name, SUSTAINED["hopper"])
    for name, relative in RELATIVES.items():
        formats = {"bf16", "fp8", "fp4"}
        if name not in {"cuda", "rocm"}:
            formats = {str(k) for k in load_gpu(name).peak_flops_per_s}
        curves = derived(relative, fitted[relative.of], formats)
        source = f"no tables; from {relative.of}: {relative.why}"
        files[name] = _text(name, source, curves, _spread(relative))
    return files


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    options = parser.parse_args()
    for name, text in fitted_files(options.folder).items():
        (options.out / f"{name}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
