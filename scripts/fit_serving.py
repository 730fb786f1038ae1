"""Fits the curves of serving kernels to public operator tables, and writes their files.

    python scripts/fit_serving.py FOLDER [--out DIR] [--only GPU ...]

FOLDER holds gemm.parquet, attention.parquet, moe.parquet, collectives.parquet,
moe_alltoall.parquet and systems.csv: operator timings of NVIDIA AIConfigurator (Apache-2.0) in
SI units. One YAML a GPU is written, with the spread that the fit leaves. The tables stay
outside.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from scipy.optimize import least_squares

HEADER = """\
# Serving kernels: decode shapes, routed experts, all-reduces of kilobytes; written by
# scripts/fit_serving.py.
# Source: NVIDIA AIConfigurator (https://github.com/ai-dynamo/aiconfigurator),
# commit 095f58a51c4ca8e61b66ec108d86f223f8d559ce
# Licence: Apache-2.0, copyright NVIDIA CORPORATION & AFFILIATES
# changed: fitted
"""
TABLES = {
    "a100_sxm_80gb": "a100_sxm",
    "h100_sxm": "h100_sxm",
    "h200_sxm": "h200_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
}
# dtype in the tables, our name, bytes of a weight, whose peak it works against.
PRODUCTS = (
    ("bf16", "bf16", 2.0, "bf16"),
    ("fp8", "fp8", 1.0, "fp8"),
    ("fp8_block", "fp8_block", 1.0, "fp8"),
    ("nvfp4", "nvfp4", 0.5625, "fp4"),
    ("int4_wo", "int4_wo", 0.5625, "bf16"),
    ("w4a16_mxfp4", "w4a16_mxfp4", 0.53125, "bf16"),
    ("w4a8_mxfp4_mxfp8", "w4a8_mxfp4", 0.53125, "fp8"),
)
MAX_POINTS = 5000
Bounds = tuple[list[float], list[float], list[float]]


def _fit(predict: Any, seconds: Any, start: Bounds) -> tuple[Any, float]:
    """Returns parameters (in logs while fitting) and the spread of log(fitted / measured)."""
    first, low, high = (np.log(side) for side in start)

    def residual(x: Any) -> Any:
        return np.log(predict(np.exp(x)) / seconds)

    found = least_squares(residual, first, bounds=(low, high), loss="soft_l1", f_scale=0.1)
    rest = residual(found.x)
    spread = 1.4826 * float(np.median(np.abs(rest - np.median(rest))))
    return np.exp(found.x), spread


def _read(folder: Path, table: str, *filters: tuple[str, str, Any]) -> pd.DataFrame:
    found = pd.read_parquet(folder / f"{table}.parquet", filters=list(filters))
    return found.sample(min(len(found), 20 * MAX_POINTS), random_state=0)


def _thin(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.sample(min(len(rows), MAX_POINTS), random_state=0)


def _columns(rows: pd.DataFrame, *names: str) -> list[Any]:
    return [rows[name].to_numpy(float) for name in names]


class Gpu:
    """Peaks and bandwidth of one GPU of the tables."""

    def __init__(self, folder: Path, name: str) -> None:
        row = pd.read_csv(folder / "systems.csv").set_index("gpu").loc[name]
        self.name = name
        self.bytes_per_s = float(row.hbm_bandwidth_bytes_per_s)
        self.peak = {
            kind: float(row[f"{kind}_dense_flops_per_s"]) for kind in ("bf16", "fp8", "fp4")
        }


def gemm_curves(folder: Path, gpu: Gpu) -> list[dict[str, Any]]:
    """Returns a curve a dtype of plain products, small batches included."""
    out = []
    for theirs, ours, weight, base in PRODUCTS:
        rows = _read(folder, "gemm", ("gpu", "==", gpu.name), ("dtype", "==", theirs))
        keep = (~rows.suspect) & rows.n.between(512, 20_000) & rows.k.between(512, 20_000)
        rows = _thin(rows[keep])
        if len(rows) < 100 or not np.isfinite(gpu.peak[base]):
            continue
        m, n, k, seconds = _columns(rows, "m", "n", "k", "latency_s")
        flops, moved = 2 * m * n * k, n * k * weight + 2 * m * (k + n)

        def predict(x: Any, a: Any = (m, n, k, flops, moved, gpu.peak[base])) -> Any:
            m, n, k, flops, moved, peak = a
            share = x[0] * m / (m + x[1]) * k / (k + x[2]) * n / (n + x[3])
            return x[5] + np.maximum(flops / (peak * share), moved / (gpu.bytes_per_s * x[4]))

        bounds = (
            [0.7, 50, 200, 200, 0.7, 4e-6],
            [0.05, 0.01, 1, 1, 0.2, 1e-6],
            [1, 2000, 5000, 5000, 1, 3e-5],
        )
        x, spread = _fit(predict, seconds, bounds)
        out.append(_curve("gemm", ours, x, spread, len(rows), f"{theirs} GEMM table, all m"))
    return out


def expert_curves(folder: Path, gpu: Gpu) -> list[dict[str, Any]]:
    """Returns a curve a dtype of routed experts: permute, both products and combine in one."""
    out = []
    for theirs, ours, weight, base in PRODUCTS:
        filters = [("gpu", "==", gpu.name), ("dtype", "==", theirs)]
        rows = _read(folder, "moe", *filters, ("distribution", "==", "balanced"))
        rows = _of_engine(rows, theirs)
        keep = (
            rows.gated
            & (rows.hidden.astype(float) * rows.inter / rows.tp >= 1.5e6)
            & (rows.topk > 1)
        )
        rows = _thin(rows[keep])
        if len(rows) < 40 or not np.isfinite(gpu.peak[base]):
            continue
        names = ("num_tokens", "hidden", "inter", "topk", "num_experts", "tp", "ep", "latency_s")
        t, h, i, top, e, tp, ep, seconds = _columns(rows, *names)
        i, mine, taken = i / tp, e / ep, t * top / ep
        touched = mine * (1 - (1 - top / e) ** t)
        flops = 6 * taken * h * i
        moved = touched * 3 * h * i * weight + taken * 2 * (2 * h + 3 * i)
        m = taken / touched

        def predict(x: Any, a: Any = (m, h, i, flops, moved, gpu.peak[base])) -> Any:
            m, h, i, flops, moved, peak = a
            share = x[0] * m / (m + x[1]) * h / (h + x[2]) * i / (i + x[3])
            return x[5] + np.maximum(flops / (peak * share), moved / (gpu.bytes_per_s * x[4]))

        bounds = (
            [0.5, 50, 200, 200, 0.7, 3e-5],
            [0.05, 0.01, 1, 1, 0.1, 1e-6],
            [1, 2000, 9000, 9000, 1, 3e-4],
        )
        x, spread = _fit(predict, seconds, bounds)
        source = f"{theirs} table of routed experts, balanced, all of a layer in one row"
        out.append(_curve("grouped_gemm", ours, x, spread, len(rows), source))
    return out


def _of_engine(rows: pd.DataFrame, dtype: str) -> pd.DataFrame:
    """TensorRT-LLM's rows where it has the format (all ep), else SGLang's of ep 1."""
    mine = rows[rows.framework == "trtllm"]
    if dtype == "nvfp4":
        mine = mine[mine.kernel_source == "moe_torch_flow_cutlass"]
    return mine if len(mine) >= 40 else rows[(rows.framework == "sglang") & (rows.ep == 1)]


def _curve(
    kind: str, dtype: str, x: Any, spread: float, points: int, source: str
) -> dict[str, Any]:
    names = ("max_efficiency", "half_m", "half_k", "half_n", "memory_efficiency", "floor_s")
    values = {name: _short(v) for name, v in zip(names, x, strict=True)}
    return {
        "kind": kind, "dtype": dtype, **values, "residual_log": round(spread, 3),
        "points": points, "source": source,
    }  # fmt: skip


def decode_curves(folder: Path, gpu: Gpu) -> list[dict[str, Any]]:
    """Returns curves of attention over a cache, grouped-query and latent."""
    out = []
    for kind, cache, width in (
        ("gqa", "bf16", 64), ("gqa", "bf16", 128), ("gqa", "fp8", 64), ("gqa", "fp8", 128),
        ("mla", "bf16", 576), ("mla", "fp8", 576),
    ):  # fmt: skip
        found = _latent(folder, gpu, cache) if kind == "mla" else None
        found = found or _decode(folder, gpu, kind, cache, width)
        if found is not None:
            out.append(found)
    return out


def _latent(folder: Path, gpu: Gpu, cache: str) -> dict[str, Any] | None:
    """Fits what context adds to whole latent-attention modules of TensorRT-LLM.

    The kernel's own table is of an engine whose fp8 cache has no fast kernel. What a context
    adds over the shortest one at the same batch and heads is the kernel's stream alone; the
    floor is that of the kernel's bf16 table.
    """
    rows = _read(
        folder, "attention", ("gpu", "==", gpu.name), ("kind", "==", "decode_mla_module"),
        ("kv_dtype", "==", cache), ("gemm_dtype", "==", "fp8_block"),
    )  # fmt: skip
    plain = _decode(folder, gpu, "mla", "bf16", 576)
    if len(rows) < 100 or plain is None:
        return None
    group = rows.groupby(["batch", "heads"])
    added = rows.assign(
        rest=rows.latency_s - group.latency_s.transform("min"),
        more=rows.kv_len - group.kv_len.transform("min"),
    )
    added = added[(added.rest > 3e-5) & (added.kv_len >= 512)]
    b, more, heads, rest = _columns(added, "batch", "more", "heads", "rest")
    moved = b * more * 576 * (1.0 if cache == "fp8" else 2.0)
    flops = 2 * b * more * heads * 1088

    def predict(x: Any) -> Any:
        return np.maximum(moved / (gpu.bytes_per_s * x[0]), flops / (gpu.peak["bf16"] * x[1]))

    x, spread = _fit(predict, rest, ([0.7, 0.6], [0.05, 0.05], [1, 1]))
    return {
        "kind": "mla", "kv_dtype": cache, "head_dim": 576, "floor_s": plain["floor_s"],
        "row_s": plain["row_s"], "memory_efficiency": _short(x[0]), "max_efficiency": _short(x[1]),
        "residual_log": round(spread, 3), "points": len(added),
        "source": "decode_mla_module table: what context adds; floor of the decode_mla table",
    }  # fmt: skip


def _decode(folder: Path, gpu: Gpu, kind: str, cache: str, width: int) -> dict[str, Any] | None:
    filters = [
        ("gpu", "==", gpu.name),
        ("kind", "==", f"decode_{kind}"),
        ("kv_dtype", "==", cache),
    ]
    if kind == "gqa":
        filters += [("head_dim", "==", width), ("window", "==", 0)]
    rows = _read(folder, "attention", *filters)
    if kind == "gqa":
        rows = rows[rows.heads.between(2 * rows.kv_heads, 16 * rows.kv_heads)]
    rows = _thin(rows)
    if len(rows) < 100:
        return None
    b, length, heads, kv_heads, seconds = _columns(
        rows, "batch", "kv_len", "heads", "kv_heads", "latency_s"
    )
    value = 1.0 if cache == "fp8" else 2.0
    lanes = b if kind == "mla" else b * kv_heads
    moved = lanes * length * value * (width if kind == "mla" else 2 * width)
    flops = 2 * b * length * heads * (1088 if kind == "mla" else 2 * width)

    def predict(x: Any) -> Any:
        work = np.maximum(moved / (gpu.bytes_per_s * x[2]), flops / (gpu.peak["bf16"] * x[3]))
        return x[0] + x[1] * lanes + work

    bounds = ([1e-5, 2e-8, 0.8, 0.5], [1e-6, 1e-10, 0.05, 0.05], [1e-4, 1e-5, 1, 1])
    x, spread = _fit(predict, seconds, bounds)
    names = ("floor_s", "row_s", "memory_efficiency", "max_efficiency")
    values = {name: _short(v) for name, v in zip(names, x, strict=True)}
    return {
        "kind": kind, "kv_dtype": cache, "head_dim": width, **values,
        "residual_log": round(spread, 3), "points": len(rows), "source": f"decode_{kind} table",
    }  # fmt: skip


def all_reduce_curves(folder: Path, gpu: Gpu) -> list[dict[str, Any]]:
    """Returns all-reduces of decode size by the engine's own kernels: alpha + bytes / rate."""
    filters = [("gpu", "==", gpu.name), ("op", "==", "all_reduce")]
    rows = _read(folder, "collectives", *filters)
    rows = rows[rows.implementation == "trtllm_auto"]
    out = []
    for ranks, mine in rows[rows.bytes.between(1024, 2**26)].groupby("num_gpus"):
        n, seconds = _columns(mine, "bytes", "latency_s")
        x, spread = _fit(
            lambda x, n=n: x[0] + n / x[1], seconds, ([3e-6, 2e11], [1e-6, 1e10], [1e-4, 5e12])
        )
        out.append(
            {
                "collective": "all_reduce", "link": "intra_node", "ranks": int(ranks),
                "alpha_s": _short(x[0]), "bytes_per_s": _short(x[1]),
                "residual_log": round(spread, 3), "points": len(mine),
                "domain_bytes": [float(n.min()), float(n.max())],
            }
        )  # fmt: skip
    return out


def exchange_curve(folder: Path, gpu: Gpu) -> dict[str, Any] | None:
    """Returns the low-latency exchange, of one node and of several where there are tables."""
    filters = [("gpu", "==", gpu.name), ("implementation", "==", "deepep_low_latency")]
    rows = _read(folder, "moe_alltoall", *filters)
    if len(rows) < 50:
        return None
    near_link = {"b200_sxm": 900e9, "gb200": 900e9}.get(gpu.name, 450e9)
    ranks, nodes, tokens, hidden, top, seconds = _columns(
        rows, "num_gpus", "num_nodes", "tokens_per_gpu", "hidden", "topk", "latency_s"
    )
    width = np.where(rows.op == "dispatch", 1.0, 2.0)
    sent, local = tokens * top * hidden * width, ranks / nodes
    near, far = sent * (local - 1) / (ranks - 1), sent * (ranks - local) / (ranks - 1)

    def predict(x: Any) -> Any:
        inside = x[0] + near / (near_link * x[1])
        return np.where(nodes > 1, np.maximum(inside, x[2] + far / (50e9 * x[3])), inside)

    bounds = ([1.4e-5, 0.6, 2.8e-5, 0.95], [1e-6, 0.1, 1e-6, 0.3], [1e-4, 1.5, 1e-4, 1.2])
    x, spread = _fit(predict, seconds, bounds)
    names = ("near_base_s", "near_share", "far_base_s", "far_share")
    values = {name: _short(v) for name, v in zip(names, x, strict=True)}
    return {**values, "residual_log": round(spread, 3), "points": len(rows)}


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def fitted(folder: Path, name: str) -> str:
    """Returns the text of one GPU's file."""
    gpu = Gpu(folder, TABLES[name])
    record: dict[str, Any] = {
        "id": f"serving-{name}",
        "source": f"operator tables of {TABLES[name]}",
        "curves": [*gemm_curves(folder, gpu), *expert_curves(folder, gpu)],
        "decode": decode_curves(folder, gpu),
        "all_reduce": all_reduce_curves(folder, gpu),
    }
    exchange = exchange_curve(folder, gpu)
    if exchange is not None:
        record["exchange"] = exchange
    return HEADER + yaml.safe_dump(record, sort_keys=False, width=100)


def main() -> None:
    """Writes the files of all GPUs that have tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("simulator/hardware/serving"))
    parser.add_argument("--only", nargs="*", default=tuple(TABLES))
    args = parser.parse_args()
    for name in args.only:
        (args.out / f"{name}.yaml").write_text(fitted(args.folder, name))
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
