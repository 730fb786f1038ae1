"""The part of fit_links.py that reads published runs: networks, and links without own tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import yaml
from fit_links_tables import (
    COMMIT,
    HOLD_OUT,
    TABLES,
    Curve,
    distinct,
    fit,
    rounded,
    wire_bytes,
    write,
)
from scipy.optimize import least_squares, nnls

from flopwright.simulator.collectives.curves import LinkCurves, SizeCurve
from flopwright.simulator.collectives.formulas import all_reduce_s
from flopwright.simulator.collectives.levels import levels
from flopwright.simulator.collectives.net import make_net
from flopwright.simulator.collectives.topology import group_shape
from flopwright.simulator.hardware.nodes import cluster_of
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import read_yaml

NETWORKS: Final = (
    "Curves of collectives between nodes.\n"
    "Source: published measurements, named below, and for expert exchanges the tables of NVIDIA\n"
    f"AIConfigurator (github.com/ai-dynamo/aiconfigurator, commit\n{COMMIT}, Apache-2.0,\n"
    "copyright NVIDIA CORPORATION & AFFILIATES). changed: fitted. Written by scripts/fit_links.py."
)
NVLINK5: Final = 900e9


def published(folder: Path) -> pd.DataFrame:
    """Returns the published all-reduce rows with payload and bus bandwidth as numbers."""
    rows = pd.read_csv(folder / "validation" / "kernels_and_links.csv")
    rows = rows[(rows.kind == "all_reduce") & (rows.metric == "busbw")].copy()
    found = rows["shape/size"].str.extract(r"(\d+) ?(B|KiB|MiB|GiB)$")
    scale = found[1].map({"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30})
    rows["bytes"], rows["busbw"] = found[0].astype(float) * scale, rows.value.astype(float) * 1e9
    return rows


def all_reduce_times(rows: pd.DataFrame, g: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns payloads and seconds of rows of one group, the smallest first."""
    rows = rows.sort_values("bytes")
    n = rows.bytes.to_numpy(float)
    return n, 2 * (g - 1) / g * n / rows.busbw.to_numpy(float)


def ring_over_racks(rows: pd.DataFrame) -> tuple[float, float]:
    """Returns what a rank adds to a pass of a ring, and the bytes/s of a rack's adapters.

    From 1,440 GPUs in 20 racks: the seconds of a large all-reduce are a line in its bytes. It
    starts at 2 (g-1) hops beside the racks' own latency; its slope is the adapters'.
    """
    g, racks, network_s = 1440, 20, 8e-6
    n, t = all_reduce_times(rows[rows.id.str.startswith(f"cw-gb200-{g}-")], g)
    start, slope = nnls(np.stack([1 / t, n / t], 1), np.ones_like(t))[0]
    hop_s = (start - 2 * (racks - 1) * network_s) / (2 * (g - 1))
    return float(f"{hop_s:.3g}"), float(2 * (g - 1) / g / slope)


def adapter_share(folder: Path) -> float:
    """Returns the share of a 400 Gbit/s adapter that NVIDIA's engineers expect of a ring."""
    value = pd.read_csv(folder / "validation" / "kernels_and_links.csv").set_index("id").value
    low, high = (float(value[f"nccl290-ndr-nic{end}"]) for end in ("", "-hi"))
    return (low + high) / 2 / 50


class Network:
    """A network to fit: all-reduces of g GPUs of a node type, through the formulas themselves.

    So what is held against the measured time is the fastest algorithm at each size. `fixed`
    is (base_s, share) where they are not to be fitted: no small messages were measured, or
    switches that add up (SHARP) let the all-reduce run above what adapters carry.
    """

    def __init__(
        self,
        node: str,
        near: Path,
        g: int,
        hop_s: float,
        tree: Curve,
        fixed: tuple[float, float] | None = None,
    ) -> None:
        cluster = cluster_of(node, g)
        self.group = group_shape([g], [1], cluster.node.domain_gpus)
        self.near, self.levels = validate(LinkCurves, read_yaml(near)), levels(cluster)
        self.hop_s, self.tree, self.fixed = hop_s, tree, fixed

    def seconds(self, parameters: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Returns seconds at parameters (base in us, share, ramp in MB)."""
        first, share, ramp = (float(v) for v in parameters)
        base, share = self.fixed or (first * 1e-6, share)
        ring = SizeCurve(ranks=4, base_s=base, share=share, ramp_bytes=ramp * 1e6)
        curves = {"ring": (ring,), "tree": (SizeCurve.model_validate(self.tree),)}
        far = LinkCurves(name="", source="", curves=curves, hop_s=self.hop_s)
        return all_reduce_s(n[:, None], self.group, make_net(self.levels, self.near, far))[:, 0]

    def solve(self, n: np.ndarray, t: np.ndarray) -> np.ndarray:
        """Returns the parameters of the least squared logarithmic error."""

        def error(p: np.ndarray) -> np.ndarray:
            return np.asarray(np.log(self.seconds(p, n) / t))

        bounds = ((0, 0.3, 0), (1000, 1, 100))
        start, scale = (100.0, 0.9, 0.1), (100, 0.1, 0.1)
        return np.asarray(least_squares(error, start, bounds=bounds, x_scale=scale).x)


def fit_network(name: str, net: Network, n: np.ndarray, t: np.ndarray) -> Curve:
    """Returns a network's curve and prints its held-out errors."""
    held = np.arange(len(n)) % HOLD_OUT == 1
    error = np.abs(net.seconds(net.solve(n[~held], t[~held]), n[held]) / t[held] - 1)
    print(f"{name}: {held.sum()} held out, median {np.median(error):.3f}, max {error.max():.3f}")
    best = net.solve(n, t)
    rest = np.log(net.seconds(best, n) / t)
    base, share = net.fixed or (best[0] * 1e-6, best[1])
    curve = {"base_s": base, "share": share, "ramp_bytes": best[2] * 1e6, "points": len(n)}
    return rounded(curve | {"residual_log": float(np.sqrt(np.mean(rest**2)))}, 4)


def exchange_curve(folder: Path) -> Curve:
    """Returns the curve of expert exchanges over a network: DeepEP over four nodes of H100.

    Eight nodes of the same table are left out: dispatch there falls to half above 4,096
    tokens and combine runs above the adapter's rate below it, so their routing is not known.
    """
    table = pd.read_parquet(folder / "operators" / "moe_alltoall.parquet")
    rows = table[(table.num_nodes == 4) & (table.implementation == "deepep_normal")]
    rows = rows[(rows.sms >= 20) & (rows.tokens_per_gpu >= 128)]
    copies = distinct(4, 8) * 3 / 4
    width = np.where(rows.op == "dispatch", 1 + 4 / 128, 2.0)
    wire = (rows.tokens_per_gpu * rows.hidden * width * copies).to_numpy(float)
    return rounded(fit(wire, rows.latency_s.to_numpy(float), 50e9), 4)


def tree_curve(rows: pd.DataFrame) -> Curve:
    """Returns the curve of trees over a network, from NCCL's NVLSTree over four nodes of H200."""
    row = rows[rows.id == "todo-h200-4node-nvlstree"].iloc[0]
    n = 16 * 2.0**30  # the size of its neighbours in the same list: the row gives none
    seconds = 2 * 31 / 32 * n / row.busbw
    return {
        "ranks": 4, "base_s": 0.0, "share": float(f"{2 * n / 8 / 50e9 / seconds:.3g}"),
        "ramp_bytes": 0.0, "points": 1,
    }  # fmt: skip


def between_nodes(folder: Path, out: Path) -> None:
    """Writes the networks."""
    rows = published(folder)
    hop, _ = ring_over_racks(rows)
    hop_source = "all-reduces of 1,440 GB200 in 20 racks (coreweave/nccl-tests)"
    # Below 256 KiB the rows may include warm-up, as their notes say.
    efa = rows[rows.id.str.startswith("b200-4node") & (rows.bytes >= 2**18)]
    tree, tree_source = tree_curve(rows), "32 H200 in four nodes, NVLSTree (stas00/ml-engineering)"
    net = Network("aws_p6_b200", out / "nvlink5_b200.yaml", 32, hop, tree)
    record: dict[str, Any] = {
        "name": "efa",
        "source": "all-reduces of 32 B200 in four nodes (stas00/ml-engineering)",
        "curves": {
            "ring": [fit_network("efa", net, *all_reduce_times(efa, 32))],
            "tree": [tree],
        },
        "hop_s": hop,
        "sources": {"hop_s": hop_source, "tree": tree_source},
    }
    write(out / "efa.yaml", record, NETWORKS)
    ndr = rows[rows.id.str.startswith("cw-h100-64-")]
    share = adapter_share(folder)
    net = Network("hgx_h100", out / "nvlink4_h100.yaml", 64, hop, tree, (0.0, share))
    ring = fit_network("rdma", net, *all_reduce_times(ndr, 64))
    record = {
        "name": "rdma",
        "source": "all-reduces of 64 H100 in eight nodes (coreweave/nccl-tests); DeepEP over four",
        "curves": {"ring": [ring], "tree": [tree], "all_to_all": [exchange_curve(folder)]},
        "hop_s": hop,
        "sources": {
            "hop_s": hop_source,
            "tree": tree_source,
            "ring.base_s": "no rows of small messages: hops alone",
            "ring.share": "46 to 48 GB/s of a 400 Gbit/s adapter: NVIDIA/nccl-tests issue 290",
        },
    }
    write(out / "rdma.yaml", record, NETWORKS)


def _h800(link: dict[str, Any], folder: Path, _: Path) -> None:
    rows = pd.read_csv(folder / "validation" / "kernels_and_links.csv").set_index("id")
    for call in ("dispatch", "combine"):
        share = float(rows.value[f"deepep-v1-567632d-intranode-EP8-{call}"]) * 1e9 / 200e9
        curve = {"share": share, "ramp_bytes": 0.0, "residual_log": 0.0, "points": 1}
        link["curves"][f"moe_{call}"][0] |= curve


def _nvl72(link: dict[str, Any], folder: Path, out: Path) -> None:
    rows = published(folder)
    n, t = all_reduce_times(rows[rows.id.str.startswith("cw-gb200-72-")], 72)
    curve = fit(wire_bytes("all_reduce", n, 72, nvls=True), t, NVLINK5, base=2.5e-5)
    node = yaml.safe_load((out / "nvlink5_b200.yaml").read_text(encoding="utf-8"))
    few = node["curves"]["all_reduce_nvls"]
    link["curves"]["all_reduce_nvls"] = [*few, rounded(curve, 72)]
    link["curves"] |= rack_experts(folder)
    link["sms"] = {}
    _, rate = ring_over_racks(rows)
    link["max_adapters"] = float(f"{rate / (50e9 * adapter_share(folder)):.3g}")
    link["sources"] = {
        "all_reduce_nvls.base_s": "as the eight B200 of a node",
        "max_adapters": "all-reduces of 1,440 GB200 in 20 racks (coreweave/nccl-tests)",
    }


def _xgmi(link: dict[str, Any], folder: Path, _: Path) -> None:
    rows = pd.read_csv(folder / "validation" / "kernels_and_links.csv").set_index("id")
    old = link["curves"]["all_reduce_ring"][0]
    each = []
    for g, rate in ((2, 448e9 / 7), (8, 448e9)):
        share = float(f"{float(rows.value[f'mi300x-ar-{g}']) * 1e9 / rate:.3g}")
        curve = {"ranks": g, "base_s": 2 * (g - 1) * 3e-6, "share": share}
        each.append(curve | {"ramp_bytes": old["ramp_bytes"], "points": 1})
    link |= {"curves": {"all_reduce_ring": each}, "nvls_above": None, "sms": {}, "gpu_sms": None}
    link["sources"] = {"base_s": "assumed: 3 us a step", "ramp_bytes": "as nvlink4_h100"}


DERIVED: Final = (
    ("nvlink4_h800", "nvlink4_h100", _h800, "as nvlink4_h100; experts: DeepEP on one H800 node"),
    (
        "nvlink5_nvl72",
        "nvlink5_gb200",
        _nvl72,
        "as nvlink5_gb200; NVLS: nvlink5_b200, and 72 GPUs of coreweave/nccl-tests; experts: "
        "TensorRT-LLM in one rack",
    ),
    ("xgmi", "nvlink4_h100", _xgmi, "all-reduces of 2 and 8 MI300X (stas00/ml-engineering)"),
)


def derived(folder: Path, out: Path) -> None:
    """Writes links without tables of their own: a relative's curves, with what is published."""
    for name, like, change, source in DERIVED:
        link = yaml.safe_load((out / f"{like}.yaml").read_text(encoding="utf-8"))
        change(link, folder, out)
        write(out / f"{name}.yaml", link | {"name": name, "source": source}, TABLES)


def rack_experts(folder: Path) -> dict[str, list[Curve]]:
    """Returns dispatch and combine inside one NVL72 rack, from 4 to 64 GPUs.

    Of TensorRT-LLM's two kernels the faster for each call: two-sided for a bf16 dispatch,
    one-sided (to 32 GPUs) for combine.
    """
    table = pd.read_parquet(folder / "operators" / "moe_alltoall.parquet")
    rows = table[(table.gpu == "gb200") & (table.num_gpus >= 4) & (table.tokens_per_gpu >= 64)]
    two_sided = (rows.implementation == "trtllm_nvlinktwosided") & (rows.dtype == "bf16")
    one_sided = rows.implementation == "trtllm_nvlinkonesided"
    keep = (two_sided & (rows.op == "dispatch")) | (one_sided & (rows.op == "combine"))
    out: dict[str, list[Curve]] = {}
    for (op, g), each in rows[keep].groupby(["op", "num_gpus"]):
        copies = np.array([distinct(float(g), k) for k in each.topk]) * (g - 1) / g
        wire = (each.tokens_per_gpu * each.hidden * 2 * copies).to_numpy(float)
        curve = fit(wire, each.latency_s.to_numpy(float), NVLINK5)
        out.setdefault(f"moe_{op}", []).append(rounded(curve, int(g)))
    return out
