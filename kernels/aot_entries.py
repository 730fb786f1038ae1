"""What is compiled ahead of time: each kernel's wrapper, called on shapes of real models.

Tensors are meta tensors: no memory and no numbers, only types, shapes and strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

TOKENS: Final = 4096
BF16: Final = torch.bfloat16
FP32: Final = torch.float32


def _meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _numbers(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int64)


def _grouped(experts: int, rows: int, inner: int, out: int) -> Callable[[], None]:
    def run() -> None:
        from flopwright.kernels.grouped_gemm import kernel

        x, grad, counts = _meta(rows, inner), _meta(rows, out), _numbers(experts)
        weight = _meta(experts, out, inner)
        kernel.forward(x, weight, counts)
        kernel.input_gradient(grad, weight, counts)
        kernel.weight_gradient(grad, x, counts)

    return run


def _permute(top_k: int, width: int) -> Callable[[], None]:
    def run() -> None:
        from flopwright.kernels.moe_permute import kernel

        order = _numbers(TOKENS * top_k)
        rows, weights = _meta(TOKENS * top_k, width), _meta(TOKENS, top_k, dtype=FP32)
        kernel.permute(_meta(TOKENS, width), order, top_k)
        kernel.sum_choices(rows, weights, order, top_k)
        kernel.sum_choices(rows, None, order, top_k)
        kernel.unpermute_gradients(_meta(TOKENS, width), rows, weights, order)

    return run


def _attention(heads: int, groups: int, width: int, v_width: int) -> Callable[[], None]:
    def run() -> None:
        from flopwright.kernels.attention import backward, kernel

        q, k = _meta(1, TOKENS, heads, width), _meta(1, TOKENS, groups, width)
        v = _meta(1, TOKENS, groups, v_width)
        out, lse, _ = kernel.forward(q, k, v, width**-0.5, 0)
        backward.backward(out, q, k, v, out, lse, width**-0.5, 0)

    return run


def _rms_norm(width: int) -> Callable[[], None]:
    def run() -> None:
        from flopwright.kernels.rms_norm import kernel

        x, weight, rstd = _meta(TOKENS, width), _meta(width), _meta(TOKENS, dtype=FP32)
        kernel.forward(x, weight, 1e-6)
        kernel.forward(x, weight, 1e-6, x)
        kernel.backward(x, x, weight, rstd)
        kernel.backward(x, x, weight, rstd, x)

    return run


def _rope(heads: int, width: int, start: int, interleaved: bool) -> Callable[[], None]:
    def run() -> None:
        from flopwright.kernels.rope import kernel

        pairs = (width - start) // 2
        cos = _meta(TOKENS, pairs, dtype=FP32)
        kernel.turn(_meta(1, TOKENS, heads, width), cos, cos, start, interleaved)
        if start:  # MLA: its keys share the rotary part
            kv, key = _meta(1, TOKENS, heads, start + 128), _meta(1, TOKENS, 2 * pairs)
            keys, values = kernel.mla_key_value(kv, key, cos, cos, start)
            kernel.mla_key_value_backward(keys, values, cos, cos, start)

    return run


def _gated(width: int, bounds: tuple[float, float] | None) -> Callable[[], None]:
    def run() -> None:
        from flopwright.kernels.swiglu import kernel

        gate = _meta(TOKENS, width)
        kernel.forward(gate, gate, bounds)
        kernel.backward(gate, gate, gate, bounds)

    return run


def _gated_fp8(width: int, bounds: tuple[float, float] | None) -> Callable[[], None]:
    def run() -> None:
        from flopwright.kernels.swiglu import kernel

        gate = _meta(TOKENS, width)
        y, g8, gs, u8, us = kernel.forward_fp8(gate, gate, bounds)
        kernel.backward_fp8(y, (g8, gs), (u8, us), bounds)

    return run


def _fp8(width: int) -> Callable[[], None]:
    def run() -> None:
        from flopwright.kernels.fp8_quantize import kernel

        x = _meta(TOKENS, width)
        kernel.dequantize(*kernel.quantize(x), BF16)
        kernel.dequantize_blocks(*kernel.quantize_blocks(x), BF16)

    return run


def _mx(width: int) -> Callable[[], None]:
    def run() -> None:
        from flopwright.kernels.mx_quantize import kernel

        for element in ("e2m1", "e4m3"):
            kernel.fake_quantize(_meta(TOKENS, width), element)

    return run


def _head(hidden: int, vocab: int) -> Callable[[], None]:
    def run() -> None:
        from flopwright.kernels.linear_cross_entropy import kernel

        x, weight, targets = _meta(TOKENS, hidden), _meta(vocab, hidden), _numbers(TOKENS)
        lse, _ = kernel.statistics(x, weight, targets)
        part = vocab // 16
        kernel.gradient_part(x, weight, targets, lse, _meta(dtype=FP32), 0, part)

    return run


def _lk(hidden: int, vocab: int) -> Callable[[], None]:
    def run() -> None:
        from flopwright.kernels.lk_loss import kernel

        side = _meta(TOKENS, hidden), _meta(vocab, hidden), _meta(2, TOKENS, dtype=FP32)
        shared, below = kernel.overlap(side, side)
        kernel.gradient_part(side, side, shared, below, _meta(dtype=FP32), 0, vocab // 16)

    return run


def _schulz(batch: int, rows: int, columns: int) -> Callable[[], None]:
    def run() -> None:
        from flopwright.kernels.newton_schulz import kernel

        gram = kernel.symmetric(_meta(batch, rows, columns), 1.0)
        kernel.symmetric(gram, 1.0, gram, 1.0)

    return run


def _histogram(experts: int) -> Callable[[], None]:
    def run() -> None:
        from flopwright.kernels.balance_histogram import kernel

        scores = _meta(TOKENS, experts, dtype=FP32)
        kernel.histogram(scores, _meta(TOKENS, dtype=FP32), -1.0, 1.0, 1000)

    return run


def _kda(heads: int) -> Callable[[], None]:
    def run() -> None:
        from flopwright.kernels.kda import kernel

        q, g = _meta(1, TOKENS, heads, 128), _meta(1, TOKENS, heads, 128, dtype=FP32)
        beta = _meta(1, TOKENS, heads, dtype=FP32)
        o, end = kernel.forward(q, q, q, g, beta, 128**-0.5, None)
        kernel.backward(o, end, q, q, q, g, beta, 128**-0.5, None)

    return run


def _kda_across(heads: int) -> Callable[[], None]:
    def run() -> None:
        from flopwright.kernels.kda import across_kernel

        q, g = _meta(1, TOKENS, heads, 128), _meta(1, TOKENS, heads, 128, dtype=FP32)
        beta = _meta(1, TOKENS, heads, dtype=FP32)
        across_kernel.summary(q, q, g, beta)
        across_kernel.state_gradient(q, q, q, g, beta, 128**-0.5)

    return run


SITU: Final = (4.0, 25.0)
LLAMA: Final = "Llama-70B"
# (kernel, model) -> its launches. Experts: K2 with 16 expert-parallel ranks, K3 with 64.
ENTRIES: Final[dict[tuple[str, str], Callable[[], None]]] = {
    ("grouped_gemm", "K2"): _grouped(24, TOKENS * 8, 7168, 4096),
    ("grouped_gemm", "K3"): _grouped(14, TOKENS * 16, 3584, 6144),
    ("moe_permute", "K2"): _permute(8, 7168),
    ("moe_permute", "K3"): _permute(16, 3584),
    ("attention", "K2"): _attention(64, 64, 192, 128),
    ("attention", "K3"): _attention(96, 96, 192, 128),
    ("attention", LLAMA): _attention(64, 8, 128, 128),
    ("rms_norm", "K2"): _rms_norm(7168),
    ("rms_norm", "K3"): _rms_norm(3584),
    ("rms_norm", LLAMA): _rms_norm(8192),
    ("rope", "K2"): _rope(64, 192, 128, True),
    ("rope", LLAMA): _rope(64, 128, 0, False),
    ("swiglu", "K2"): _gated(2048, None),
    ("swiglu", "K3"): _gated(3072, SITU),
    ("swiglu", LLAMA): _gated(28672, None),
    ("gated_fp8", "K2"): _gated_fp8(2048, None),
    ("gated_fp8", "K3"): _gated_fp8(3072, SITU),
    ("fp8_quantize", "K2"): _fp8(7168),
    ("fp8_quantize", LLAMA): _fp8(8192),
    ("mx_quantize", "K3"): _mx(3584),
    ("linear_cross_entropy", "K2"): _head(7168, 163840),
    ("linear_cross_entropy", LLAMA): _head(8192, 128256),
    ("lk_loss", "K3"): _lk(7168, 163840),
    ("newton_schulz", "K2"): _schulz(24, 2048, 7168),
    ("newton_schulz", "K3"): _schulz(14, 3072, 3584),
    ("kda", "K3"): _kda(96),
    ("kda_across", "K3"): _kda_across(96),
    ("balance_histogram", "K3"): _histogram(896),
}
