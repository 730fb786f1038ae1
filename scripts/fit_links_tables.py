"""The part of fit_links.py that reads tables: curves inside a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import yaml
from scipy.optimize import nnls

COMMIT: Final = "095f58a51c4ca8e61b66ec108d86f223f8d559ce"
# Link file, GPU of the tables, bytes/s of a GPU each way, GPUs above which NVLS is chosen.
LINKS: Final[tuple[tuple[str, str, float, int | None], ...]] = (
    ("nvlink3_a100", "a100_sxm", 300e9, None),
    ("nvlink4_h100", "h100_sxm", 450e9, 4),
    ("nvlink4_h200", "h200_sxm", 450e9, 4),
    ("nvlink5_b200", "b200_sxm", 900e9, 5),
    ("nvlink5_b300", "b300_sxm", 900e9, 5),
    ("nvlink5_gb200", "gb200", 900e9, 5),
    ("nvlink5_gb300", "gb300", 900e9, 5),
    ("pcie5_rtx_pro_6000", "rtx_pro_6000_server", 63e9, None),
)
# Streaming multiprocessors of a GPU: NVIDIA architecture white papers (A100, H100) and, of the
# Blackwells, what CUDA reports.
SMS: Final = {"a100_sxm": 108, "h100_sxm": 132, "h200_sxm": 132, "b200_sxm": 148, "b300_sxm": 148}
DEEPEP: Final = "0.5.12"  # the release of SGLang whose DeepEP rows cover every GPU
HOLD_OUT: Final = 3  # every third size is kept out of the fit and scored

Curve = dict[str, Any]


def wire_bytes(op: str, n: np.ndarray, g: int, nvls: bool = False) -> np.ndarray:
    """Returns bytes that a GPU puts on its link, by the payload conventions of nccl-tests."""
    if op == "all_reduce":
        return n * (1 + 1 / g) if nvls else 2 * n * (g - 1) / g
    return n * (g - 1) / g


def fit(wire: np.ndarray, seconds: np.ndarray, rate: float, base: float | None = None) -> Curve:
    """Returns base_s, share and ramp_bytes of one curve; `base` fixes the first."""
    columns = [np.ones_like(wire), wire / rate, np.sqrt(wire) / rate]
    target = seconds - wire / rate  # share <= 1: what the link itself takes is not fitted
    if base is not None:
        target, columns = target - base, columns[1:]
    found, _ = nnls(np.stack(columns, 1) / seconds[:, None], target / seconds)
    first = base if base is not None else float(found[0])
    slope, root = (float(v) for v in found[-2:])
    curve = {"base_s": first, "share": 1 / (1 + slope), "ramp_bytes": root**2}
    rest = np.log(seconds / predict(curve, wire, rate))
    return curve | {"residual_log": float(np.sqrt(np.mean(rest**2))), "points": len(wire)}


def predict(curve: Curve, wire: np.ndarray, rate: float) -> np.ndarray:
    """Returns the seconds of a curve."""
    root = np.sqrt(wire * curve["ramp_bytes"])
    return np.asarray(curve["base_s"] + (wire / curve["share"] + root) / rate)


def rounded(curve: Curve, ranks: int) -> Curve:
    """Returns a curve as it is written."""
    numbers = {k: float(f"{curve[k]:.3g}") for k in ("base_s", "share", "ramp_bytes")}
    rest = {"residual_log": round(curve["residual_log"], 3), "points": curve["points"]}
    return {"ranks": ranks} | numbers | rest


# Published runs of 8 GiB and more on one node, to which the tables (up to 512 MiB) do not reach:
# (GPU of the tables, collective, GPUs) and the rows' ids.
LARGE: Final = {
    ("a100_sxm", "all_reduce", 8): ("a100-8gpu-ar-8589934592", "a100-8gpu-ar-17179869184"),
    ("h200_sxm", "all_reduce", 4): ("nvls-H200-4gpu-ring",),
    ("h200_sxm", "all_reduce", 8): ("nvls-H200-8gpu-default", "h200-8gpu-16g-ar-nvls"),
    ("h200_sxm", "all_gather", 8): ("h200-8gpu-16g-ag",),
    ("h200_sxm", "reduce_scatter", 8): ("h200-8gpu-16g-rs",),
    ("b200_sxm", "all_reduce", 4): ("nvls-B200-4gpu-ring",),
    ("b200_sxm", "all_reduce", 8): ("nvls-B200-8gpu-default", "b200-1node-ar-16GiB"),
}


def large_rows(folder: Path) -> pd.DataFrame:
    """Returns the rows of LARGE in the tables' columns."""
    rows = pd.read_csv(folder / "validation" / "kernels_and_links.csv").set_index("id")
    found = rows["shape/size"].str.extract(r"(\d+) ?(B|KiB|MiB|GiB)$")
    scale = found[1].map({"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30})
    size = found[0].astype(float) * scale
    out = []
    for (gpu, op, g), ids in LARGE.items():
        for name in ids:
            n = float(size[name])
            wire = wire_bytes(op, np.array([n]), g)[0]
            seconds = wire / (float(rows.value[name]) * 1e9)
            out.append({"gpu": gpu, "op": op, "num_gpus": g, "bytes": n, "latency_s": seconds})
    return pd.DataFrame(out)


def nccl_curves(
    table: pd.DataFrame, rate: float, nvls_above: int | None, scores: list[dict[str, Any]]
) -> dict[str, list[Curve]]:
    """Returns the curves of NCCL inside a node by algorithm, and adds held-out scores."""
    out: dict[str, list[Curve]] = {}
    for (op, g), rows in table.groupby(["op", "num_gpus"]):
        rows = rows.sort_values("bytes")
        nvls = op == "all_reduce" and nvls_above is not None and g > nvls_above
        n, t = (rows[c].to_numpy(float) for c in ("bytes", "latency_s"))
        wire = wire_bytes(str(op), n, int(g), nvls)
        held = np.arange(len(n)) % HOLD_OUT == 1
        name = f"{op}_nvls" if nvls else f"{op}_pairs" if op == "all_to_all" else f"{op}_ring"
        trial = fit(wire[~held], t[~held], rate)
        error = np.abs(predict(trial, wire[held], rate) / t[held] - 1)
        scores.append(
            {"gpu": rows.gpu.iloc[0], "curve": name, "ranks": g, "points": int(held.sum())}
            | {"median": float(np.median(error)), "p90": float(np.quantile(error, 0.9))}
        )
        out.setdefault(name, []).append(rounded(fit(wire, t, rate), int(g)))
    return out


def distinct(places: float, draws: float) -> float:
    """Returns how many of `places` equal places `draws` draws touch on average."""
    return places * (1 - (1 - 1 / places) ** draws)


def expert_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Returns DeepEP's normal kernels inside a node with the bytes a GPU puts on the link.

    A token goes once to each rank that holds one of its experts. Dispatch is counted as FP8
    with a float32 scale for 128 numbers, which its time relative to combine confirms.
    """
    rows = table[(table.implementation == "deepep_normal") & (table.num_nodes == 1)].copy()
    g = rows.num_gpus.to_numpy(float)
    copies = np.array([distinct(p, k) for p, k in zip(g, rows.topk, strict=True)])
    width = np.where(rows.op == "dispatch", 1 + 4 / 128, 2.0)
    rows["wire"] = rows.tokens_per_gpu * rows.hidden * width * copies * (g - 1) / g
    return rows


def expert_curves(
    table: pd.DataFrame, rate: float, scores: list[dict[str, Any]]
) -> tuple[dict[str, list[Curve]], int]:
    """Returns dispatch and combine curves at the number of SMs that is fastest to training's.

    Held out are whole shapes (hidden, topk, experts), every third of them.
    """
    rows = expert_rows(table)
    rows = rows[(rows.tokens_per_gpu >= 64) & (rows.sms == 20)]
    newest = rows[rows.version == DEEPEP]
    shapes = newest.groupby(["hidden", "topk", "num_experts"]).ngroup()
    out: dict[str, list[Curve]] = {}
    for op, each in newest.groupby("op"):
        g, held = int(each.num_gpus.iloc[0]), (shapes[each.index] % HOLD_OUT == 1).to_numpy()
        wire, t = each.wire.to_numpy(float), each.latency_s.to_numpy(float)
        trial = fit(wire[~held], t[~held], rate)
        error = np.abs(predict(trial, wire[held], rate) / t[held] - 1)
        scores.append(
            {"gpu": each.gpu.iloc[0], "curve": f"moe_{op}", "ranks": g, "points": int(held.sum())}
            | {"median": float(np.median(error)), "p90": float(np.quantile(error, 0.9))}
        )
        out[f"moe_{op}"] = [rounded(fit(wire, t, rate), g)]
    return out, 20


def write(path: Path, record: dict[str, Any], header: str) -> None:
    """Writes one link file."""
    record = {k: v for k, v in record.items() if v not in ({}, None)}
    text = "".join(f"# {line}\n" for line in header.splitlines())
    body = yaml.safe_dump(record, sort_keys=False, width=99, default_flow_style=None)
    path.write_text(text + body, encoding="utf-8")


TABLES: Final = (
    "Curves of collectives on one link, seconds = base_s + (w / share + sqrt(w ramp_bytes)) / b.\n"
    "Source: NVIDIA AIConfigurator (github.com/ai-dynamo/aiconfigurator, commit\n"
    f"{COMMIT}, "
    "Apache-2.0, copyright NVIDIA CORPORATION & AFFILIATES). changed: fitted.\n"
    "Written by scripts/fit_links.py."
)


NETWORKS: Final = (
    "Curves of collectives between nodes.\n"
    "Source: published measurements, named below, and for expert exchanges the tables of NVIDIA\n"
    f"AIConfigurator (github.com/ai-dynamo/aiconfigurator, commit\n{COMMIT}, Apache-2.0,\n"
    "copyright NVIDIA CORPORATION & AFFILIATES). changed: fitted. Written by scripts/fit_links.py."
)


def more(gpu: str) -> str:
    """Returns what a link's source adds where published runs go beyond the tables."""
    wide = any(name == gpu for name, _, _ in LARGE)
    return "; from 8 GiB published runs (stas00/ml-engineering)" if wide else ""


def inside_nodes(folder: Path, out: Path) -> pd.DataFrame:
    """Writes the links inside a node; returns the held-out scores."""
    nccl = pd.read_parquet(folder / "operators" / "collectives.parquet")
    nccl = nccl[(nccl.implementation == "nccl") & (nccl.dtype == "half")]
    nccl = pd.concat([nccl, large_rows(folder)])
    experts = pd.read_parquet(folder / "operators" / "moe_alltoall.parquet")
    scores: list[dict[str, Any]] = []
    for name, gpu, rate, nvls_above in LINKS:
        curves = nccl_curves(nccl[nccl.gpu == gpu], rate, nvls_above, scores)
        sms: dict[str, int] = {}
        if (experts.gpu == gpu).any():
            found, count = expert_curves(experts[experts.gpu == gpu], rate, scores)
            curves |= found
            sms = dict.fromkeys(found, count)
        gather = curves["all_gather_ring"]
        first, last = gather[0], gather[-1]
        hop = (last["base_s"] - first["base_s"]) / (last["ranks"] - first["ranks"])
        record = {
            "name": name,
            "source": f"NCCL and DeepEP tables of {gpu}, one node" + more(gpu),
            "curves": curves,
            "hop_s": float(f"{max(hop, 0.0):.3g}"),
            "nvls_above": nvls_above,
            "sms": sms,
            "gpu_sms": SMS.get(gpu) if sms else None,
        }
        write(
            out / f"{name}.yaml", {k: v for k, v in record.items() if v not in ({}, None)}, TABLES
        )
    return pd.DataFrame(scores)
