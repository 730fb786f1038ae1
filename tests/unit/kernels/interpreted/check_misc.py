"""Run by test_in_the_interpreter.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flopwright.kernels.checks.compare import failures, verify
from flopwright.kernels.checks.misc import histogram_verdict, mx_verdicts, newton_schulz_check

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize("shape", [(70, 33), (2, 20, 50), (1, 7), (2, 1, 40, 40)], ids=str)
def test_newton_schulz(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert not failures(verify(newton_schulz_check(shape, dtype, CPU), dtype))


@DTYPES
@pytest.mark.parametrize("element", ["e2m1", "e4m3", "e5m2"])
@pytest.mark.parametrize("size", [1.0, 1e-38, 1e36])
def test_microscaling(element: str, size: float, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16:
        size = max(size, 1e-30)  # the interpreter reads subnormal bf16 numbers wrongly
    for shape in ((3, 100), (1, 1), (2, 2, 64)):
        assert not failures(mx_verdicts(shape, element, dtype, CPU, size))


@settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 4), st.integers(2, 300))
def test_histogram_drawn(tokens: int, experts: int, top_k: int, bins: int) -> None:
    assert histogram_verdict(tokens, experts, top_k, bins, CPU).passes
