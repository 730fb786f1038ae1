"""Kernels of other libraries that an op may run on a GPU, and how.

Our op keeps what it always keeps, so saved bytes do not depend on the choice. Where a library
has its passes as plain functions (RMSNorm) both are called; otherwise through its public
autograd function: forward without a graph, and in the backward pass once more with one. Its
time in `benchmarks/kernels.py` has that second call in it, as a training step would.

`attention` and `grouped_gemm` have torch's own kernels in their place, called by their ops.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Library:
    """Where a kernel comes from: what is imported, and what is installed."""

    package: str
    pip: str


_TORCH: Final = Library("torch", "torch")
_LIGER: Final = Library("liger_kernel", "liger-kernel")
LIBRARIES: Final[dict[str, Library]] = {
    "attention": _TORCH,
    "grouped_gemm": _TORCH,
    "rms_norm": _LIGER,
    "linear_cross_entropy": _LIGER,
    "kda": Library("fla", "flash-linear-attention"),
}


@cache
def installed(package: str) -> bool:
    """Returns whether a library is here."""
    return importlib.util.find_spec(package) is not None


def missing(op: str) -> str:
    """Returns why an op cannot run a library's kernel here, "" where it can."""
    library = LIBRARIES.get(op)
    if library is None:
        return "no library's kernel is known"
    return "" if installed(library.package) else f"{library.pip} is not installed"


def traced(x: Tensor) -> bool:
    """Returns whether a compiler looks at the call: then ops stay ops."""
    return type(x) not in {Tensor, nn.Parameter}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (norm, reciprocal root mean square) by liger-kernel, rounded once at the end."""
    module: Any = importlib.import_module("liger_kernel.ops.rms_norm")
    # Offset 0; "gemma" keeps everything in fp32 until the result is stored.
    y, _, rstd, *_ = module.rms_norm_forward(x.contiguous(), weight, eps, 0.0, "gemma", None)
    return y.view(x.shape), rstd.view(x.shape[:-1])


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of weight by liger-kernel; `grad` is left as it is."""
    module: Any = importlib.import_module("liger_kernel.ops.rms_norm")
    settings: Any = importlib.import_module("liger_kernel.ops.utils").calculate_settings
    width = x.shape[-1]
    block, num_warps = settings(width)
    mode = module._str_to_casting_mode["gemma"]
    d_x, d_weight = module.rms_norm_backward(
        grad.contiguous(), x.reshape(-1, width), weight, rstd.reshape(-1), 0.0, mode, block,
        num_warps, False, None,
    )  # fmt: skip
    return d_x.view(x.shape), d_weight


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean nats a token by liger-kernel."""
    module: Any = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    out: Tensor = module.LigerFusedLinearCrossEntropyFunction.apply(x, weight, targets)[0]
    return out


def kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns (result, last state) by flash-linear-attention."""
    chunk_kda: Any = importlib.import_module("fla.ops.kda").chunk_kda
    out, end = chunk_kda(
        q, k, v, g, beta, scale=scale, initial_state=state, output_final_state=True
    )
    return out, end


def gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: tuple[Tensor | None, ...],
    grads: tuple[Tensor, ...],
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the inputs, None for those that are None, by a second call.

    Args:
        function: of the inputs; its results get `grads`.
    """
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
        out = function(*leaves)
        outs = out if isinstance(out, tuple) else (out,)
        wanted = [x for x in leaves if x is not None]
        cast = [g.to(o.dtype) for g, o in zip(grads, outs, strict=True)]
        found = iter(torch.autograd.grad(outs, wanted, cast))
    return tuple(None if x is None else next(found) for x in leaves)
