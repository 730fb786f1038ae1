"""Run by test_in_the_interpreter.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flopwright.kernels.checks.compare import failures, verify
from flopwright.kernels.checks.norms import mla_check, norm_checks, rope_check
from flopwright.kernels.rms_norm import kernel
from flopwright.kernels.rms_norm.op import rms_norm, rms_norm_backward

CPU = torch.device("cpu")
FORMATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = pytest.mark.parametrize("dtype", FORMATS, ids=["fp32", "bf16", "fp16"])


@DTYPES
@pytest.mark.parametrize("size", [1.0, 100.0, 1e-3])
@pytest.mark.parametrize("shape", [(3, 5, 192), (1, 7)], ids=str)
def test_norms(shape: tuple[int, ...], size: float, dtype: torch.dtype) -> None:
    size = torch.tensor(size).to(dtype).item()
    for check in norm_checks(shape, dtype, CPU, size):
        assert not failures(verify(check, dtype))


def test_more_rows_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_PROGRAMS_BACKWARD", 4)
    for check in norm_checks((10, 9), FORMATS[0], CPU):
        assert not failures(verify(check, FORMATS[0]))


def test_norm_of_rows_that_are_apart_and_of_none() -> None:
    wide = torch.randn(4, 40)
    x, weight = wide[:, 3:36], torch.randn(33)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm(x.contiguous(), weight, 1e-6))
    empty = torch.empty(0, 8)
    y, rstd = rms_norm(empty, torch.ones(8), 1e-6)
    dx, dw = rms_norm_backward(empty, empty, torch.ones(8), rstd)
    assert y.shape == dx.shape == (0, 8)
    assert not dw.any()


@DTYPES
@pytest.mark.parametrize(
    ("shape", "start", "interleaved"),
    [((2, 5, 3, 22), 10, True), ((1, 4, 17, 16), 0, False), ((1, 1, 1, 9), 3, True)],
    ids=str,
)
def test_rope(
    shape: tuple[int, int, int, int], start: int, interleaved: bool, dtype: torch.dtype
) -> None:
    assert not failures(verify(rope_check(shape, start, interleaved, dtype, CPU), dtype))


@DTYPES
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 1), (1, 2, 20)], ids=str)
def test_mla_keys_and_values(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert not failures(verify(mla_check(shape, (20, 8, 12), dtype, CPU), dtype))


@settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 20), st.integers(0, 9), st.booleans())
def test_rope_drawn(seq: int, heads: int, pairs: int, start: int, interleaved: bool) -> None:
    check = rope_check((1, seq, heads, start + 2 * pairs), start, interleaved, FORMATS[0], CPU)
    assert not failures(verify(check, FORMATS[0]))
