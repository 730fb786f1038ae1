"""The same numbers laid out in memory in another way: no kernel may take strides for granted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.balance_histogram.op import balance_histogram
from flopwright.kernels.checks.activations import activation_checks
from flopwright.kernels.checks.attention import attention_check
from flopwright.kernels.checks.compare import Check, Function
from flopwright.kernels.checks.experts import (
    draw,
    grouped_gemm_check,
    permute_check,
    unpermute_check,
)
from flopwright.kernels.checks.kda import kda_check
from flopwright.kernels.checks.losses import cross_entropy_check, lk_check
from flopwright.kernels.checks.misc import newton_schulz_check
from flopwright.kernels.checks.norms import mla_check, norm_checks, rope_check
from flopwright.kernels.fp8_quantize import op as fp8
from flopwright.kernels.mx_quantize.op import mx_fake_quantize
from flopwright.kernels.swiglu.situ import gated_fp8, gated_fp8_backward

FP32 = torch.float32


def apart(x: Tensor) -> Tensor:
    """Returns x with its dimensions in reverse order in memory, other numbers between its own."""
    between = float("nan") if x.is_floating_point() and x.itemsize > 1 else 1
    wide = torch.full((*x.shape[::-1], 2), between, device=x.device).to(x.dtype)
    order = tuple(reversed(range(x.ndim)))
    wide[..., 0] = x.detach().permute(order)
    return wide[..., 0].permute(order)


def differentiable_checks(device: torch.device) -> list[Check]:
    """Returns one small check of each op that has a gradient."""
    return [
        attention_check((2, 5, 4, 2), (6, 3), FP32, device),
        attention_check((2, 5, 4, 4), (6, 6), FP32, device),  # no head is copied before
        attention_check((1, 5, 2, 1), (8, 8), FP32, device, window=2),
        grouped_gemm_check([3, 0, 2], 6, 4, FP32, device),
        permute_check(6, 2, 5, 9, FP32, device),
        unpermute_check(6, 2, 5, 9, FP32, device),
        *norm_checks((2, 3, 10), FP32, device),
        rope_check((2, 3, 2, 9), 3, True, FP32, device),
        mla_check((2, 3, 2), (4, 2, 4), FP32, device),
        *activation_checks((2, 3, 10), FP32, device),
        cross_entropy_check(5, 6, 9, FP32, device),
        lk_check(5, 6, 9, FP32, device),
        kda_check((1, 18, 1), (4, 6), FP32, device),
    ]


Lay = Callable[[Tensor], Tensor]


def results(check: Check, lay: Lay) -> list[Tensor]:
    """Returns results and gradients of a check's op, all its tensors laid out by a function."""
    leaves = [lay(x.float()).requires_grad_(x.is_floating_point()) for x in check.tensors]
    rest = [lay(x) if isinstance(x, Tensor) else x for x in check.rest]
    out = check.op(*leaves, *rest)
    outs = (out if isinstance(out, tuple) else (out,))[: check.outputs]
    generator = torch.Generator().manual_seed(1)
    grads = [lay(torch.randn(o.shape, generator=generator).to(o.device)) for o in outs]
    inputs = [x for i, x in enumerate(leaves) if i not in check.constant]
    return [*(o.detach() for o in outs), *torch.autograd.grad(outs, inputs, grads)]


def plain_calls(device: torch.device) -> Iterator[tuple[str, Function, tuple[Any, ...]]]:
    """Yields (name, op, arguments) of the ops without a gradient, and of a way back by itself."""
    x = draw(0, device, FP32, 9, 130).float()
    codes, blocks = fp8.quantize(x), fp8.quantize_blocks(x)
    yield "fp8", fp8.quantize, (x,)
    yield "fp8 back", fp8.dequantize, (*codes, FP32)
    yield "fp8 blocks", fp8.quantize_blocks, (x,)
    yield "fp8 blocks back", fp8.dequantize_blocks, (*blocks, FP32)
    yield "mx", mx_fake_quantize, (x, "e2m1")
    yield "histogram", balance_histogram, (x[:9, :5], x[0, :9], -1.0, 1.0, 10)
    kept = gated_fp8(x, x, [])[1:]
    yield "gated_fp8", gated_fp8, (x, x.flip(0), [])
    yield "gated_fp8 back", gated_fp8_backward, (x, *kept, [])
    schulz = newton_schulz_check((2, 5, 7), FP32, device)
    yield "newton_schulz", schulz.op, tuple(t.float() for t in schulz.tensors)


def call(op: Function, args: tuple[Any, ...], lay: Lay) -> list[Tensor]:
    """Returns what an op makes of its arguments laid out by a function, 8-bit floats as fp32."""
    out = op(*(lay(a) if isinstance(a, Tensor) else a for a in args))
    outs = out if isinstance(out, tuple) else (out,)
    return [o.float() if o.itemsize == 1 else o for o in outs]
