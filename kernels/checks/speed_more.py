"""Contenders of the ops that no library has: our kernel beside torch's composed form."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flopwright.kernels.balance_histogram.cost import balance_histogram as histogram_cost
from flopwright.kernels.balance_histogram.op import balance_histogram
from flopwright.kernels.checks.contenders import Case, Maker, Run, rows_of, running_with
from flopwright.kernels.fp8_quantize.cost import quantize as quantize_cost
from flopwright.kernels.fp8_quantize.op import dequantize, quantize, quantize_blocks
from flopwright.kernels.lk_loss.cost import linear_lk_loss as lk_cost
from flopwright.kernels.lk_loss.op import linear_lk_loss
from flopwright.kernels.lk_loss.reference import linear_lk_loss as lk_composed
from flopwright.kernels.moe_permute.cost import permute as permute_cost
from flopwright.kernels.moe_permute.op import permute, sort_by_expert
from flopwright.kernels.rms_norm.cost import add_rms_norm as sum_cost
from flopwright.kernels.rms_norm.op import add_rms_norm
from flopwright.kernels.rope.cost import rope as rope_cost
from flopwright.kernels.rope.op import mla_key_value
from flopwright.kernels.swiglu.cost import gated_fp8 as gated_cost
from flopwright.kernels.swiglu.situ import gated_fp8, gated_fp8_packed
from flopwright.ops import CostBuilder, Phase


def _two(op: str, run: Run) -> dict[str, Run]:
    """Returns our kernel and the reference, torch's operators one after the other."""
    kernels = (("triton", "triton"), ("torch", "reference"))
    return {name: running_with(op, kernel, run) for name, kernel in kernels}


def fused_cases(m: Maker) -> Iterator[Case]:
    """Yields what makes one pass of two: residual sum and norm, gates that keep FP8."""
    rows, width = m.size(8192), m.size(7168, 64)
    yield Case(
        "add_rms_norm", f"{rows} x {width}",
        _two("add_rms_norm", lambda x, y, w: add_rms_norm(x, y, w, 1e-6)[0]),
        (m.leaf(rows, width), m.leaf(rows, width), m.leaf(width)),
        rows_of(lambda c: sum_cost(c, "sum", rows=rows, width=width, dtype=m.name)),
    )  # fmt: skip
    rows, width = m.size(32768), m.size(2048, 128)
    cost = rows_of(lambda c: gated_cost(c, "gated", rows=rows, width=width, dtype=m.name))
    yield Case(
        "gated_fp8", f"{rows} x {width}", _two("gated_fp8", lambda g, u: gated_fp8(g, u, [])[0]),
        (m.leaf(rows, width), m.leaf(rows, width)), cost,
    )  # fmt: skip
    yield Case(
        "gated_fp8", f"{rows} x 2 x {width}, SiTU",
        _two("gated_fp8", lambda both: gated_fp8_packed(both, [4.0, 25.0])[0]),
        (m.leaf(rows, 2 * width),), cost,
    )  # fmt: skip


def moved_cases(m: Maker) -> Iterator[Case]:
    """Yields the gather to experts, MLA's keys and values, and FP8 there and back."""
    tokens, width = m.size(4096), m.size(7168, 128)
    choices = torch.rand(tokens, 64, device=m.device).topk(8, -1).indices
    order, place, _ = sort_by_expert(choices, 64)
    yield Case(
        "moe_permute", f"permute {tokens} x 8 x {width}",
        _two("moe_permute", lambda x: permute(x, order, place, 8)), (m.leaf(tokens, width),),
        rows_of(lambda c: permute_cost(
            c, "permute", tokens=tokens, top_k=8, width=width, dtype=m.name)),
    )  # fmt: skip
    heads = m.size(64, 2)
    angle = m.leaf(tokens, 32, grad=False, dtype=torch.float32)
    both = m.leaf(1, tokens, heads, 256)
    yield Case(
        "mla_key_value", f"{tokens} x {heads} x (128, 64, 128)",
        _two("rope", lambda kv, k: mla_key_value(kv, k, angle, angle, 128)[0]),
        (both, m.leaf(1, tokens, 64)),
        rows_of(lambda c: rope_cost(c, "kv", elements=both.numel(), dtype=m.name)),
    )  # fmt: skip
    flat = m.leaf(tokens, width, grad=False)
    codes, scales = quantize(flat)

    def back(codes: Tensor, scales: Tensor) -> Tensor:
        wide: Tensor = dequantize(codes, scales, m.dtype)
        return wide

    for label, run, inputs, blocks in (
        ("back", back, (codes, scales), False),
        ("in blocks", lambda x: quantize_blocks(x)[1], (flat,), True),
    ):
        cost = CostBuilder()
        quantize_cost(cost, "quantize", Phase.FORWARD, rows=tokens, width=width, dtype=m.name,
                      back=not blocks, blocks=blocks)  # fmt: skip
        yield Case(
            "fp8_quantize", f"{tokens} x {width} {label}", _two("fp8_quantize", run), inputs,
            cost.build().ops, differentiable=False,
        )  # fmt: skip


def drafted_cases(m: Maker) -> Iterator[Case]:
    """Yields the loss of a draft head, and the histogram of quantile balancing."""
    tokens, hidden, vocab = m.size(4096), m.size(7168, 64), m.size(163840, 256)
    goal = m.leaf(tokens, hidden, grad=False), m.leaf(vocab, hidden, grad=False)
    run = running_with("lk_loss", "triton", lambda x, w: linear_lk_loss(x, w, *goal)[0])
    yield Case(
        "lk_loss", f"{tokens} x {hidden} x {vocab}",
        {"triton": run, "torch": lambda x, w: lk_composed(x, w, *goal)},
        (m.leaf(tokens, hidden), m.leaf(vocab, hidden)),
        rows_of(lambda c: lk_cost(
            c, "lk", tokens=tokens, hidden=hidden, vocab=vocab, dtype=m.name)),
    )  # fmt: skip
    tokens, experts = m.size(65536), m.size(896, 16)
    scores = torch.rand(tokens, experts, device=m.device)
    alpha = scores.topk(min(17, experts), -1).values[:, -1]
    yield Case(
        "balance_histogram", f"{tokens} x {experts}",
        _two("balance_histogram", lambda s: balance_histogram(s, alpha, -1.0, 1.0, 1000)),
        (scores,),
        rows_of(lambda c: histogram_cost(
            c, "h", tokens=tokens, num_experts=experts, bins=1000, dtype="fp32")),
        differentiable=False,
    )  # fmt: skip


MORE = (fused_cases, moved_cases, drafted_cases)
