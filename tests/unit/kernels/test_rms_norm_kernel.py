"""The Triton kernel in the interpreter, and compiled ahead of time for GPUs.

Whether `triton.jit` interprets is decided when it decorates, so each mode has its process.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

INTERPRETED = """
import torch
from flopwright.kernels.rms_norm import kernel, reference
torch.manual_seed(0)
for shape, width in (((3, 5), 192), ((1, 1), 7), ((9,), 256)):
    wide = torch.randn(*shape, width + 5)
    x, w = wide[..., :width], torch.randn(width)   # rows that are not next to each other
    grad = torch.randn(*shape, width)
    y, rstd = kernel.forward(x, w, 1e-6)
    exact, exact_rstd = reference.rms_norm(x.double(), w.double(), 1e-6)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rstd.double(), exact_rstd, rtol=1e-5, atol=1e-6)
    dx, dw = kernel.backward(grad, x, w, rstd)
    want = reference.rms_norm_backward(grad.double(), x.double(), w.double(), exact_rstd)
    torch.testing.assert_close(dx.double(), want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dw.double(), want[1], rtol=1e-5, atol=1e-5)
empty = kernel.forward(torch.empty(0, 8), torch.ones(8), 1e-6)[0]
assert empty.shape == (0, 8)
dx, dw = kernel.backward(torch.empty(0, 8), torch.empty(0, 8), torch.ones(8), torch.empty(0))
assert dx.shape == (0, 8) and not dw.any()
print("equal")
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flopwright.kernels.rms_norm import kernel
signatures = {
    kernel._forward: dict(x_ptr="*bf16", w_ptr="*bf16", y_ptr="*bf16", rstd_ptr="*fp32",
                          stride="i32", width="i32", eps="fp32", BLOCK="constexpr"),
    kernel._backward: dict(g_ptr="*bf16", x_ptr="*bf16", w_ptr="*bf16", rstd_ptr="*fp32",
                           dx_ptr="*bf16", dw_ptr="*fp32", stride="i32", width="i32", rows="i32",
                           per_program="i32", BLOCK="constexpr"),
}
for fn, signature in signatures.items():
    for capability in (80, 90):
        index = list(signature).index("BLOCK")
        source = ASTSource(fn, signature=signature, constexprs={(index,): 8192})
        target = GPUTarget("cuda", capability, 32)
        done = triton.compile(source, target=target, options={"num_warps": 8})
        assert done.asm["ptx"]
print("compiled")
"""


def _run(script: str, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_kernel_equals_reference_in_the_interpreter() -> None:
    assert _run(INTERPRETED, TRITON_INTERPRET="1") == "equal"


@pytest.mark.slow
def test_kernel_compiles_for_gpus_without_one() -> None:
    assert _run(COMPILED) == "compiled"
