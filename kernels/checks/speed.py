"""Contenders for each op at real shapes: our kernel, torch's composed form, a library's.

Sizes are those of K2, K3 and Llama-70B; a trial divides them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels import libraries
from flopwright.kernels.attention.cost import attention as attention_cost
from flopwright.kernels.attention.op import attention, attention_with_max
from flopwright.kernels.checks.contenders import (
    Case,
    Maker,
    Run,
    rows_of,
    running_with,
)
from flopwright.kernels.checks.speed_more import MORE
from flopwright.kernels.fp8_quantize import reference as fp8_reference
from flopwright.kernels.fp8_quantize.cost import quantize as quantize_cost
from flopwright.kernels.fp8_quantize.op import quantize
from flopwright.kernels.grouped_gemm.cost import grouped_gemm as grouped_cost
from flopwright.kernels.grouped_gemm.op import grouped_gemm
from flopwright.kernels.kda.cost import kda as kda_cost
from flopwright.kernels.kda.op import kda
from flopwright.kernels.linear_cross_entropy.cost import linear_cross_entropy as head_cost
from flopwright.kernels.linear_cross_entropy.op import linear_cross_entropy
from flopwright.kernels.moe_permute.cost import unpermute as unpermute_cost
from flopwright.kernels.moe_permute.op import sort_by_expert, unpermute
from flopwright.kernels.mx_quantize.cost import mx_fake_quantize as mx_cost
from flopwright.kernels.mx_quantize.op import mx_fake_quantize
from flopwright.kernels.newton_schulz.op import newton_schulz
from flopwright.kernels.rms_norm.cost import rms_norm as norm_cost
from flopwright.kernels.rms_norm.op import rms_norm
from flopwright.kernels.rope.cost import rope as rope_cost
from flopwright.kernels.rope.op import rope
from flopwright.kernels.swiglu.cost import swiglu as swiglu_cost
from flopwright.kernels.swiglu.op import swiglu
from flopwright.kernels.swiglu.situ import situ_glu
from flopwright.ops import Phase


def attention_cases(m: Maker) -> Iterator[Case]:
    """Yields K2's latent attention and Llama-70B's grouped queries."""
    seq, both = m.size(4096, 32), "attention attention_with_max"
    for label, heads, groups, width, v_width in (("K2", 64, 64, 192, 128),
                                                 ("Llama-70B", 64, 8, 128, 128)):  # fmt: skip
        heads, groups = m.size(heads, 2), m.size(groups, 1)
        heads = heads // groups * groups
        q = m.leaf(1, seq, heads, width)
        k, v = m.leaf(1, seq, groups, width), m.leaf(1, seq, groups, v_width)
        scale = width**-0.5

        def ours(q: Tensor, k: Tensor, v: Tensor, scale: float = scale) -> Tensor:
            out: Tensor = attention(q, k, v, scale)[0]
            return out

        def with_max(q: Tensor, k: Tensor, v: Tensor, scale: float = scale) -> Tensor:
            out: Tensor = attention_with_max(q, k, v, scale)[0]
            return out

        def torchs(q: Tensor, k: Tensor, v: Tensor, scale: float = scale) -> Tensor:
            return F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                scale=scale, enable_gqa=True,
            ).transpose(1, 2)  # fmt: skip

        yield Case(
            "attention", f"{label} {heads}/{groups} heads, {seq} tokens",
            {
                "triton": running_with("attention", "triton", ours),
                "triton with max": running_with(both, "triton", with_max),
                "library": running_with("attention", "library", ours),
                "torch": torchs,
            },
            (q, k, v),
            rows_of(lambda c, h=heads, g=groups, w=width, x=v_width: attention_cost(
                c, "attention", sequences=1, seq_len=seq, heads=h, kv_heads=g, qk_width=w,
                v_width=x, dtype=m.name)),  # type: ignore[misc]
        )  # fmt: skip


def grouped_cases(m: Maker) -> Iterator[Case]:
    """Yields K2's experts of one rank, at balanced and at skewed load."""
    experts, inner, out = m.size(24, 4), m.size(7168, 64), m.size(4096, 64)
    rows = m.size(32768, 64) // experts * experts
    x, w = m.leaf(rows, inner), m.leaf(experts, out, inner)
    even = torch.full((experts,), rows // experts, dtype=torch.int64)
    skewed = even.clone()
    skewed[0] += skewed[1:].sum() // 2
    skewed[1:] -= skewed[1:] // 2
    skewed[-1] += rows - skewed.sum()
    for label, counts in (("balanced", even), ("skewed", skewed)):
        there = counts.to(m.device)

        def ours(x: Tensor, w: Tensor, there: Tensor = there) -> Tensor:
            y: Tensor = grouped_gemm(x, w, there)
            return y

        def one(x: Tensor, w: Tensor) -> Tensor:
            return x @ w[0].t()  # cuBLAS on one matrix of the same total size

        yield Case(
            "grouped_gemm", f"{label}, {experts} experts, {rows} x {inner} x {out}",
            {
                "triton": running_with("grouped_gemm", "triton", ours),
                "library": running_with("grouped_gemm", "library", ours),
                "one product": one,
            },
            (x, w),
            rows_of(lambda c: grouped_cost(
                c, "grouped_gemm", rows=rows, experts=experts, k=inner, n=out, dtype=m.name)),
        )  # fmt: skip


def norm_cases(m: Maker) -> Iterator[Case]:
    """Yields K2's norm."""
    rows, width = m.size(8192), m.size(7168, 64)
    contenders: dict[str, Run] = {
        "triton": running_with("rms_norm", "triton", lambda x, w: rms_norm(x, w, 1e-6)[0]),
        "torch": lambda x, w: F.rms_norm(x, (width,), w, 1e-6),
    }
    if m.library("rms_norm"):
        contenders["library"] = running_with(
            "rms_norm", "library", lambda x, w: rms_norm(x, w, 1e-6)[0]
        )
    yield Case(
        "rms_norm", f"{rows} x {width}", contenders, (m.leaf(rows, width), m.leaf(width)),
        rows_of(lambda c: norm_cost(c, "rms_norm", rows=rows, width=width, dtype=m.name)),
    )  # fmt: skip


def gate_cases(m: Maker) -> Iterator[Case]:
    """Yields both activations at the width of K2's experts."""
    rows, width = m.size(32768), m.size(2048, 64)
    inputs = (m.leaf(rows, width), m.leaf(rows, width))
    cost = rows_of(lambda c: swiglu_cost(c, "swiglu", rows=rows, width=width, dtype=m.name))
    yield Case(
        "swiglu", f"{rows} x {width}",
        {"triton": running_with("swiglu", "triton", swiglu), "torch": lambda g, u: F.silu(g) * u},
        inputs, cost,
    )  # fmt: skip
    yield Case(
        "situ_glu", f"{rows} x {width}",
        {
            "triton": running_with("situ_glu", "triton", lambda g, u: situ_glu(g, u, 4.0, 25.0)),
            "torch": lambda g, u: 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25
            * torch.tanh(u / 25),
        },
        inputs, cost,
    )  # fmt: skip


def row_cases(m: Maker) -> Iterator[Case]:
    """Yields rotations, un-permutes and the two narrow formats."""
    seq, heads = m.size(4096), m.size(64, 2)
    x, angle = m.leaf(1, seq, heads, 128), m.leaf(seq, 64, grad=False, dtype=torch.float32)
    yield Case(
        "rope", f"{seq} x {heads} x 128",
        {
            "triton": running_with("rope", "triton", lambda x: rope(x, angle, angle, 0, False)),
            "torch": running_with("rope", "reference", lambda x: rope(x, angle, angle, 0, False)),
        },
        (x,),
        rows_of(lambda c: rope_cost(c, "rope", elements=x.numel(), dtype=m.name)),
    )  # fmt: skip
    tokens, width = m.size(4096), m.size(7168, 64)
    choices = torch.rand(tokens, 64, device=m.device).topk(8, -1).indices
    order, place, _ = sort_by_expert(choices, 64)
    yield Case(
        "moe_permute", f"un-permute {tokens} x 8 x {width}",
        {k: running_with("moe_permute", v, lambda r, w: unpermute(r, w, order, place))
         for k, v in (("triton", "triton"), ("torch", "reference"))},
        (m.leaf(tokens * 8, width), m.leaf(tokens, 8, dtype=torch.float32)),
        rows_of(lambda c: unpermute_cost(
            c, "unpermute", tokens=tokens, top_k=8, width=width, dtype=m.name)),
    )  # fmt: skip
    flat = m.leaf(tokens, width, grad=False)
    yield Case(
        "fp8_quantize", f"{tokens} x {width}",
        {
            "triton": running_with("fp8_quantize", "triton", lambda x: quantize(x)[1]),
            "torch": lambda x: fp8_reference.quantize(x)[1],
        },
        (flat,),
        rows_of(lambda c: quantize_cost(
            c, "quantize", Phase.FORWARD, rows=tokens, width=width, dtype=m.name)),
        differentiable=False,
    )  # fmt: skip
    yield Case(
        "mx_quantize", f"MXFP4 {tokens} x {width}",
        {k: running_with("mx_quantize", v, lambda x: mx_fake_quantize(x, "e2m1"))
         for k, v in (("triton", "triton"), ("torch", "reference"))},
        (flat,),
        rows_of(lambda c: mx_cost(c, "mx", elements=tokens * width, dtype=m.name)),
        differentiable=False,
    )  # fmt: skip


def head_cases(m: Maker) -> Iterator[Case]:
    """Yields Llama-70B's head and loss."""
    tokens, hidden, vocab = m.size(4096), m.size(8192, 64), m.size(128256, 256)
    targets = torch.randint(0, vocab, (tokens,), device=m.device)
    contenders: dict[str, Run] = {
        "triton": running_with("linear_cross_entropy", "triton",
                        lambda x, w: linear_cross_entropy(x, w, targets)[0]),
        "torch": lambda x, w: F.cross_entropy((x @ w.t()).float(), targets),
    }  # fmt: skip
    if m.library("linear_cross_entropy"):
        contenders["library"] = running_with(
            "linear_cross_entropy", "library",
            lambda x, w: linear_cross_entropy(x, w, targets)[0],
        )  # fmt: skip
        contenders["liger"] = lambda x, w: libraries.linear_cross_entropy(x, w, targets)
    yield Case(
        "linear_cross_entropy", f"{tokens} x {hidden} x {vocab}", contenders,
        (m.leaf(tokens, hidden), m.leaf(vocab, hidden)),
        rows_of(lambda c: head_cost(
            c, "head", tokens=tokens, hidden=hidden, vocab=vocab, dtype=m.name)),
    )  # fmt: skip


def recurrent_cases(m: Maker) -> Iterator[Case]:
    """Yields K3's linear attention and the optimizer's iteration."""
    seq, heads = m.size(8192, 32), m.size(96, 1)
    q, k = (F.normalize(m.leaf(1, seq, heads, 128, grad=False).float(), dim=-1).to(m.dtype)
            .requires_grad_() for _ in range(2))  # fmt: skip
    v = m.leaf(1, seq, heads, 128)
    g = (-F.softplus(m.leaf(1, seq, heads, 128, grad=False, dtype=torch.float32))).requires_grad_()
    beta = torch.sigmoid(m.leaf(1, seq, heads, grad=False, dtype=torch.float32)).requires_grad_()
    contenders: dict[str, Run] = {
        "triton": running_with("kda", "triton", lambda *a: kda(*a, 128**-0.5)[0]),
    }
    if m.library("kda"):
        contenders["library"] = running_with("kda", "library", lambda *a: kda(*a, 128**-0.5)[0])
        contenders["fla"] = lambda q, k, v, g, b: libraries.kda(q, k, v, g, b, None, 128**-0.5)[0]
    if m.device.type == "cpu":
        contenders["torch"] = running_with("kda", "reference", lambda *a: kda(*a, 128**-0.5)[0])
    yield Case(
        "kda", f"{seq} x {heads} x 128", contenders, (q, k, v, g, beta),
        rows_of(lambda c: kda_cost(
            c, "kda", sequences=1, seq_len=seq, heads=heads, k_width=128, v_width=128,
            dtype=m.name)),
    )  # fmt: skip
    batch, rows, columns = m.size(8, 2), m.size(2048, 32), m.size(7168, 64)
    yield Case(
        "newton_schulz", f"{batch} x {rows} x {columns}",
        {k: running_with("newton_schulz", v, newton_schulz)
         for k, v in (("triton", "triton"), ("torch", "reference"))},
        (m.leaf(batch, rows, columns, grad=False),), None, differentiable=False,
    )  # fmt: skip


MAKERS = (
    grouped_cases, attention_cases, norm_cases, gate_cases, row_cases, head_cases,
    recurrent_cases, *MORE,
)  # fmt: skip
