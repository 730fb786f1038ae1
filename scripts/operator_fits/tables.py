"""Operator tables as arrays: one Points a GPU, kernel class and format.

The tables are NVIDIA AIConfigurator's (Apache-2.0) in SI units, one row a timed call. Bytes are
counted as a kernel has to move them once; what a row's time holds beside the product (the
quantisation of its input, the permutes of a mixture of experts) is in `beside_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625}


@dataclass(frozen=True)
class Part:
    """One product inside a call: its shape, its work and the bytes that it moves."""

    m: Floats
    k: Floats
    n: Floats
    flops: Floats
    nbytes: Floats


@dataclass(frozen=True)
class Points:
    """Timed calls.

    Attributes:
        parts: the products of a call, one after the other.
        rows: rows of all heads together, for attention; else of the call.
        beside_bytes: bytes of the kernels that the time holds beside the products.
        weight: how much a point counts; held: whether it is kept out of the fit.
    """

    parts: tuple[Part, ...]
    rows: Floats
    beside_bytes: Floats
    seconds: Floats
    weight: Floats
    held: NDArray[np.bool_]

    def take(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> Points:
        """Returns the chosen calls."""
        parts = tuple(
            Part(p.m[chosen], p.k[chosen], p.n[chosen], p.flops[chosen], p.nbytes[chosen])
            for p in self.parts
        )
        return Points(
            parts, self.rows[chosen], self.beside_bytes[chosen], self.seconds[chosen],
            self.weight[chosen], self.held[chosen],
        )  # fmt: skip


def _columns(
    path: Path, columns: list[str], filters: list[tuple[str, str, object]]
) -> dict[str, NDArray[np.float64]]:
    table = pq.read_table(path, columns=columns, filters=filters)
    return {c: np.asarray(table[c].to_numpy(zero_copy_only=False)) for c in columns}


def _held(*keys: Floats) -> NDArray[np.bool_]:
    """Returns a quarter of the shapes, always the same ones: whole shapes, never single rows."""
    mixed = sum(
        key * prime for key, prime in zip(keys, (7919.0, 104729.0, 1299709.0), strict=False)
    )
    return np.asarray(mixed % 101 % 4 == 0)


def gemm(folder: Path, gpu: str, dtype: str) -> Points:
    """Returns the products of a format: m from 16, sides from 64; rows marked suspect dropped."""
    got = _columns(
        folder / "gemm.parquet",
        ["m", "n", "k", "latency_s", "suspect"],
        [("gpu", "==", gpu), ("dtype", "==", dtype), ("m", ">=", 16), ("n", ">=", 64)],
    )
    keep = ~got["suspect"].astype(bool) & (got["k"] >= 64)
    m, n, k, seconds = (got[c][keep].astype(float) for c in ("m", "n", "k", "latency_s"))
    moved = 2 * m * k + _WEIGHT_BYTES[dtype] * n * k + 2 * m * n
    beside = np.zeros_like(m) if dtype == "bf16" else 3 * m * k
    large = (n >= 512) & (k >= 512)
    weight = np.where(m >= 512, 1.0, np.where(m >= 128, 0.3, 0.1)) * np.where(large, 1.0, 0.2)
    part = Part(m, k, n, 2 * m * n * k, moved)
    return Points((part,), m, beside, seconds, weight, _held(n, k))


# Framework, kind and head widths of prefill rows; the absorbed form that SGLang runs for
# latent attention on Hopper is another algorithm, so that TensorRT-LLM's is taken.
ATTENTION = {
    "gqa": ("context_gqa", "sglang"),
    "mla": ("context_mla", "trtllm"),
    "full": ("encoder", "sglang"),
}


def attention(folder: Path, gpu: str, form: str, dtype: str, head_dim: int) -> Points:
    """Returns prefill without a prefix and without a window."""
    kind, framework = ATTENTION[form]
    if gpu == "b300_sxm" and form in ("gqa", "full"):
        framework = "trtllm"
    got = _columns(
        folder / "attention.parquet",
        ["batch", "q_len", "kv_len", "heads", "kv_heads", "latency_s", "window"],
        [
            ("gpu", "==", gpu), ("kind", "==", kind), ("framework", "==", framework),
            ("dtype", "==", dtype), ("kv_dtype", "==", dtype), ("q_len", ">=", 128),
            ("head_dim", "==", 0 if form == "mla" else head_dim),
        ],
    )  # fmt: skip
    keep = (got["q_len"] == got["kv_len"]) & ((got["window"] == 0) | np.isnan(got["window"]))
    b, s, h, g, seconds = (
        np.nan_to_num(got[c][keep].astype(float))
        for c in ("batch", "q_len", "heads", "kv_heads", "latency_s")
    )
    width = 160.0 if form == "mla" else float(head_dim)  # keys of 192, values of 128
    flops = (4.0 if form == "full" else 2.0) * b * h * width * s**2
    moved = (2.0 if dtype == "bf16" else 1.0) * b * s * 2 * width * (h + np.maximum(g, 1))
    weight = np.where(s >= 1024, 1.0, 0.2)
    part = Part(s, np.full_like(s, head_dim), s, flops, moved)
    return Points((part,), b * h * s, np.zeros_like(s), seconds, weight, _held(s, b * h))


def grouped(folder: Path, gpu: str, dtype: str, framework: str, load: str) -> Points:
    """Returns mixture-of-experts layers of one GPU: routing, permutes, two grouped products.

    Rows of several ranks are those of TensorRT-LLM, which alone computes a rank's own part.
    """
    got = _columns(
        folder / "moe.parquet",
        ["num_tokens", "hidden", "inter", "topk", "num_experts", "tp", "ep", "gated", "latency_s"],
        [
            ("gpu", "==", gpu), ("dtype", "==", dtype), ("framework", "==", framework),
            ("distribution", "==", load), ("num_tokens", ">=", 256),
            ("ep", "==", 1) if framework == "sglang" or load != "balanced" else ("ep", ">=", 1),
        ],
    )  # fmt: skip
    got = {c: v.astype(float) for c, v in got.items()}
    one = got["num_tokens"] * got["topk"] / got["num_experts"]  # rows of an expert
    inter = got["inter"] / got["tp"]
    # Layers without a gate fall back to another kernel there.
    keep = (one >= 16) & (inter >= 256) & (got["gated"] > 0)
    got = {c: v[keep] for c, v in got.items()}
    one, inter, h = one[keep], inter[keep], got["hidden"]
    local, up = got["num_experts"] / got["ep"], 1 + got["gated"]
    rows = one * local
    width = _WEIGHT_BYTES[dtype]

    def product(k: Floats, n: Floats) -> Part:
        moved = rows * (k * min(width, 2) + 2 * n) + width * local * k * n
        return Part(one, k, n, 2 * rows * k * n, moved)

    beside = 4 * rows * h + 2 * rows * inter * (up + 1) + 2 * (rows + got["num_tokens"]) * h
    weight = np.where(one >= 128, 1.0, 0.3)
    held = _held(h, got["inter"], got["num_experts"])
    parts = (product(h, up * inter), product(inter, h))
    return Points(parts, rows, beside, got["latency_s"], weight, held)


def quantize(folder: Path, gpu: str) -> Points:
    """Returns casts of bf16 tensors to fp8 with a known scale: two bytes read, one written."""
    got = _columns(
        folder / "other.parquet",
        ["tokens", "hidden", "latency_s"],
        [
            ("gpu", "==", gpu), ("op", "==", "fp8_quantize"), ("framework", "==", "vllm"),
            ("tokens", ">=", 128), ("hidden", ">=", 512),
        ],
    )  # fmt: skip
    t, h, seconds = (got[c].astype(float) for c in ("tokens", "hidden", "latency_s"))
    part = Part(t, h, h, np.zeros_like(t), 3 * t * h)
    # Tensors that stay in the second-level cache say nothing of the memory.
    weight = np.where(3 * t * h >= 2**28, 1.0, 0.1)
    return Points((part,), t, np.zeros_like(t), seconds, weight, _held(t, h))


# Work of the gated delta rule as a recurrence reads it: decay-free 6 * d_k * d_v a token and head.
KDA_FLOPS = 6 * 128 * 128


def kda(folder: Path, gpu: str) -> Points:
    """Returns prefill of the chunked delta rule (the kernel that training stacks use)."""
    got = _columns(
        folder / "other.parquet",
        ["tokens", "batch", "heads", "latency_s", "kernel_source"],
        [("gpu", "==", gpu), ("op", "==", "kda_context"), ("framework", "==", "sglang")],
    )
    keep = (got["kernel_source"] == "chunk_kda") & (got["tokens"] >= 128)
    t, h, seconds, b = (
        got[c][keep].astype(float) for c in ("tokens", "heads", "latency_s", "batch")
    )
    rows = t * h
    width = np.full_like(t, 128.0)
    part = Part(t, width, width, KDA_FLOPS * rows, 2 * 5 * 128 * rows)
    weight = np.where(t >= 1024, 1.0, 0.2)
    return Points((part,), rows, np.zeros_like(t), seconds, weight, _held(t, h, b))
