"""What a probe runs: each kernel's op at a shape, priced by the same kernel's cost.py.

A case ties three things together: the rows that `cost.py` gives for the shape (what the
simulator will ask the time of), tensors of that shape, and a call of the op the model uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from flopwright.kernels.attention.cost import attention as attention_cost
from flopwright.kernels.attention.op import attention
from flopwright.kernels.cross_entropy.cost import cross_entropy as cross_entropy_cost
from flopwright.kernels.cross_entropy.op import cross_entropy
from flopwright.kernels.embedding.cost import embedding as embedding_cost
from flopwright.kernels.embedding.op import embedding
from flopwright.kernels.grouped_gemm.cost import grouped_gemm as grouped_gemm_cost
from flopwright.kernels.grouped_gemm.op import grouped_gemm
from flopwright.kernels.linear.cost import linear as linear_cost
from flopwright.kernels.linear.op import linear
from flopwright.kernels.memory_bound import memory_bound
from flopwright.kernels.moe_permute.cost import permute as permute_cost
from flopwright.kernels.moe_permute.cost import unpermute as unpermute_cost
from flopwright.kernels.moe_permute.op import permute, sort_by_expert, unpermute
from flopwright.kernels.rms_norm.cost import rms_norm as rms_norm_cost
from flopwright.kernels.rms_norm.op import rms_norm
from flopwright.kernels.rope.cost import rope as rope_cost
from flopwright.kernels.rope.op import rope
from flopwright.kernels.router.cost import route as route_cost
from flopwright.kernels.router.op import route
from flopwright.kernels.swiglu.cost import swiglu as swiglu_cost
from flopwright.kernels.swiglu.op import swiglu
from flopwright.ops import CostBuilder, OpKind, OpTable, Phase
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.model import Moe

TORCH_DTYPES: Final = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
KIND_NAMES: Final = {
    OpKind.GEMM: "gemm",
    OpKind.GROUPED_GEMM: "grouped_gemm",
    OpKind.ATTENTION: "attention",
    OpKind.MEMORY_BOUND: "memory_bound",
    OpKind.OPTIMIZER: "optimizer",
    OpKind.QUANTIZE: "quantize",
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """Tensors in place: `run` returns what gradients flow back from, `inputs` take them.

    Without inputs only the call itself is timed, and every row gets that time.
    """

    run: Callable[[], Tensor]
    inputs: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeCase:
    """One op at one shape.

    Attributes:
        rows: the cost rows of one run, forward and backward; several backward rows share
            one measured time by their FLOPs (or bytes).
        essential: a shape that the model at hand needs; the others are left out when the
            time is up.
    """

    name: str
    dtype: str
    rows: OpTable
    prepare: Callable[[torch.device], Prepared]
    essential: bool = True


def _rows(add: Callable[[CostBuilder], None]) -> OpTable:
    cost = CostBuilder()
    add(cost)
    return cost.build().ops


def _random(device: torch.device, dtype: str, *shape: int, grad: bool = True) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(0)
    values = torch.randn(*shape, generator=generator) * 0.1
    return values.to(device, TORCH_DTYPES[dtype]).requires_grad_(grad)


def linear_case(m: int, k: int, n: int, dtype: str, *, essential: bool = True) -> ProbeCase:
    """Returns y[m, n] = x[m, k] w[n, k]^T with both gradients."""

    def prepare(device: torch.device) -> Prepared:
        x, w = _random(device, dtype, m, k), _random(device, dtype, n, k)
        return Prepared(lambda: linear(x, w), (x, w))

    rows = _rows(lambda c: linear_cost(c, "linear", rows=m, k=k, n=n, dtype=dtype))
    return ProbeCase("linear", dtype, rows, prepare, essential)


def grouped_case(
    rows_each: int, experts: int, k: int, n: int, dtype: str, *, essential: bool = True
) -> ProbeCase:
    """Returns a product for each of `experts` experts with `rows_each` rows each."""
    total = rows_each * experts

    def prepare(device: torch.device) -> Prepared:
        x, w = _random(device, dtype, total, k), _random(device, dtype, experts, n, k)
        counts = torch.full((experts,), rows_each, dtype=torch.int64, device=device)
        return Prepared(lambda: grouped_gemm(x, w, counts), (x, w))

    rows = _rows(
        lambda c: grouped_gemm_cost(
            c, "grouped_gemm", rows=total, experts=experts, k=k, n=n, dtype=dtype
        )
    )
    return ProbeCase("grouped_gemm", dtype, rows, prepare, essential)


def attention_case(
    sequences: int, seq_len: int, heads: int, kv_heads: int, qk_width: int, v_width: int,
    dtype: str, *, essential: bool = True,
) -> ProbeCase:  # fmt: skip
    """Returns causal attention with its backward."""

    def prepare(device: torch.device) -> Prepared:
        q = _random(device, dtype, sequences, seq_len, heads, qk_width)
        k = _random(device, dtype, sequences, seq_len, kv_heads, qk_width)
        v = _random(device, dtype, sequences, seq_len, kv_heads, v_width)
        return Prepared(lambda: attention(q, k, v, qk_width**-0.5)[0], (q, k, v))

    rows = _rows(
        lambda c: attention_cost(
            c, "attention", sequences=sequences, seq_len=seq_len, heads=heads,
            kv_heads=kv_heads, qk_width=qk_width, v_width=v_width, dtype=dtype,
        )
    )  # fmt: skip
    return ProbeCase("attention", dtype, rows, prepare, essential)


def norm_case(tokens: int, width: int, dtype: str) -> ProbeCase:
    """Returns RMSNorm of [tokens, width]."""

    def prepare(device: torch.device) -> Prepared:
        x, w = _random(device, dtype, tokens, width), _random(device, dtype, width)
        return Prepared(lambda: rms_norm(x, w, 1e-6)[0], (x, w))

    rows = _rows(lambda c: rms_norm_cost(c, "rms_norm", rows=tokens, width=width, dtype=dtype))
    return ProbeCase("rms_norm", dtype, rows, prepare)


def swiglu_case(tokens: int, width: int, dtype: str) -> ProbeCase:
    """Returns silu(gate) * up of [tokens, width]."""

    def prepare(device: torch.device) -> Prepared:
        gate, up = _random(device, dtype, tokens, width), _random(device, dtype, tokens, width)
        return Prepared(lambda: swiglu(gate, up), (gate, up))

    rows = _rows(lambda c: swiglu_cost(c, "swiglu", rows=tokens, width=width, dtype=dtype))
    return ProbeCase("swiglu", dtype, rows, prepare)


def rope_case(
    sequences: int, seq_len: int, heads: int, nope: int, rotary: int, dtype: str
) -> ProbeCase:
    """Returns the rotation of the last `rotary` columns of each head."""

    def prepare(device: torch.device) -> Prepared:
        x = _random(device, dtype, sequences, seq_len, heads, nope + rotary)
        angles = torch.arange(seq_len, device=device).unsqueeze(1) * torch.ones(
            rotary // 2, device=device
        )
        cos, sin = angles.cos(), angles.sin()
        return Prepared(lambda: rope(x, cos, sin, nope, True), (x,))

    elements = sequences * seq_len * heads * (nope + rotary)
    rows = _rows(lambda c: rope_cost(c, "rope", elements=elements, dtype=dtype))
    return ProbeCase("rope", dtype, rows, prepare)


def cross_entropy_case(tokens: int, vocab: int, dtype: str) -> ProbeCase:
    """Returns the mean loss of [tokens, vocab] logits."""

    def prepare(device: torch.device) -> Prepared:
        logits = _random(device, dtype, tokens, vocab)
        targets = torch.arange(tokens, device=device) % vocab
        return Prepared(lambda: cross_entropy(logits, targets)[0], (logits,))

    rows = _rows(
        lambda c: cross_entropy_cost(c, "cross_entropy", tokens=tokens, vocab=vocab, dtype=dtype)
    )
    return ProbeCase("cross_entropy", dtype, rows, prepare)


def _choices(tokens: int, top_k: int, experts: int, device: torch.device) -> Tensor:
    """Returns balanced choices [tokens, top_k], each token's all different."""
    start = torch.arange(tokens, device=device).unsqueeze(1) * top_k
    return (start + torch.arange(top_k, device=device)) % experts


def permute_case(tokens: int, top_k: int, experts: int, width: int, dtype: str) -> ProbeCase:
    """Returns the gather of tokens into expert order."""

    def prepare(device: torch.device) -> Prepared:
        x = _random(device, dtype, tokens, width)
        order, place, _ = sort_by_expert(_choices(tokens, top_k, experts, device), experts)
        return Prepared(lambda: permute(x, order, place, top_k), (x,))

    rows = _rows(
        lambda c: permute_cost(c, "permute", tokens=tokens, top_k=top_k, width=width, dtype=dtype)
    )
    return ProbeCase("permute", dtype, rows, prepare)


def unpermute_case(tokens: int, top_k: int, experts: int, width: int, dtype: str) -> ProbeCase:
    """Returns the weighted sum of each token's expert rows."""

    def prepare(device: torch.device) -> Prepared:
        outputs = _random(device, dtype, tokens * top_k, width)
        weights = _random(device, "fp32", tokens, top_k)
        order, place, _ = sort_by_expert(_choices(tokens, top_k, experts, device), experts)
        return Prepared(lambda: unpermute(outputs, weights, order, place), (outputs, weights))

    rows = _rows(
        lambda c: unpermute_cost(
            c, "unpermute", tokens=tokens, top_k=top_k, width=width, dtype=dtype
        )
    )
    return ProbeCase("unpermute", dtype, rows, prepare)


def embedding_case(tokens: int, vocab: int, width: int, dtype: str) -> ProbeCase:
    """Returns the lookup of `tokens` rows and the gradient of the whole table."""

    def prepare(device: torch.device) -> Prepared:
        weight = _random(device, dtype, vocab, width)
        ids = torch.arange(tokens, device=device) * 7919 % vocab
        return Prepared(lambda: embedding(ids, weight), (weight,))

    rows = _rows(
        lambda c: embedding_cost(
            c, "embedding", tokens=tokens, vocab=vocab, width=width, dtype=dtype
        )
    )
    return ProbeCase("embedding", dtype, rows, prepare)


def route_case(tokens: int, moe: Moe, dtype: str) -> ProbeCase:
    """Returns the choice of experts by the model's own rule."""

    def prepare(device: torch.device) -> Prepared:
        logits = _random(device, "fp32", tokens, moe.num_experts)
        bias = torch.zeros(moe.num_experts, device=device)
        rule = (
            moe.top_k, moe.num_groups, moe.top_k_groups, moe.router == "softmax",
            moe.norm_top_k_prob, moe.routed_scaling_factor,
        )  # fmt: skip
        return Prepared(lambda: route(logits, bias, None, *rule)[1], (logits,))

    rows = _rows(
        lambda c: route_cost(
            c, "route", tokens=tokens, num_experts=moe.num_experts, top_k=moe.top_k, dtype=dtype
        )
    )
    return ProbeCase("route", dtype, rows, prepare)


def add_case(elements: int, dtype: str) -> ProbeCase:
    """Returns the sum of two tensors: a residual forward, a sum of gradients backward."""

    def prepare(device: torch.device) -> Prepared:
        one, two = (_random(device, dtype, elements, grad=False) for _ in range(2))
        return Prepared(lambda: one + two)

    def add(cost: CostBuilder) -> None:
        nbytes = elements * DTYPE_BYTES[dtype]
        for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT):
            memory_bound(
                cost, "add", phase, dtype=dtype, elements=elements, read_bytes=2 * nbytes,
                written_bytes=nbytes,
            )  # fmt: skip

    return ProbeCase("add", dtype, _rows(add), prepare)
