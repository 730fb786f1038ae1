"""Run by test_in_the_interpreter.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flopwright.kernels.checks.attention import attention_check
from flopwright.kernels.checks.compare import failures, verify

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "widths", "window", "size"),
    [
        ((1, 45, 1, 1), (192, 128), 0, 1.0),  # MLA
        ((2, 33, 2, 1), (16, 16), 0, 1.0),  # two query heads a key head
        ((1, 1, 2, 1), (8, 8), 0, 1.0),  # one token
        ((1, 66, 1, 1), (40, 24), 20, 1.0),  # a window
        ((1, 64, 1, 1), (32, 32), 0, 16.0),  # logits of thousands
        ((1, 32, 2, 1), (24, 16), 0, 8.0),  # of hundreds, where few keys share the weight
    ],
)
def test_attention(
    shape: tuple[int, int, int, int],
    widths: tuple[int, int],
    window: int,
    size: float,
    dtype: torch.dtype,
) -> None:
    check = attention_check(shape, widths, dtype, CPU, window, size)
    assert not failures(verify(check, dtype))


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    st.integers(1, 60),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 80),
)
def test_attention_drawn(
    seq: int, groups: int, repeat: int, qk: int, width: int, window: int
) -> None:
    shape = (1, seq, groups * repeat, groups)
    check = attention_check(shape, (qk, width), torch.float32, CPU, window)
    assert not failures(verify(check, torch.float32))
