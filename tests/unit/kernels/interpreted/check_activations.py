"""Run by test_in_the_interpreter.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flopwright.kernels.checks.activations import (
    activation_checks,
    fp8_verdicts,
    gated_fp8_verdicts,
)
from flopwright.kernels.checks.compare import failures, verify

CPU = torch.device("cpu")
FORMATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = pytest.mark.parametrize("dtype", FORMATS, ids=["fp32", "bf16", "fp16"])


@DTYPES
@pytest.mark.parametrize("shape", [(3, 130), (1, 1), (2, 3, 64)], ids=str)
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_activations(shape: tuple[int, ...], size: float, dtype: torch.dtype) -> None:
    for check in activation_checks(shape, dtype, CPU, size):
        assert not failures(verify(check, dtype))


@settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.integers(1, 4), st.integers(1, 300), st.floats(1e-4, 50), st.sampled_from(FORMATS[:2]))
def test_activations_drawn(rows: int, width: int, size: float, dtype: torch.dtype) -> None:
    for check in activation_checks((rows, width), dtype, CPU, torch.tensor(size).to(dtype).item()):
        assert not failures(verify(check, dtype))


@pytest.mark.parametrize("dtype", FORMATS[:2], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("rows", "width", "size"), [(3, 300, 1.0), (1, 1, 1e4), (130, 129, 1e-6), (2, 128, 1e30)]
)
def test_fp8(rows: int, width: int, size: float, dtype: torch.dtype) -> None:
    assert not failures(fp8_verdicts(rows, width, dtype, CPU, size))


@pytest.mark.parametrize("bounds", [[], [4.0, 25.0]], ids=["swiglu", "situ"])
@pytest.mark.parametrize("dtype", FORMATS[:2], ids=["fp32", "bf16"])
def test_kept_in_fp8(bounds: list[float], dtype: torch.dtype) -> None:
    for shape in ((3, 200), (1, 1), (2, 2, 128)):
        assert not failures(gated_fp8_verdicts(shape, bounds, dtype, CPU))
