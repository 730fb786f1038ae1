"""Run by test_in_the_interpreter.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flopwright.kernels.checks.compare import failures, verify
from flopwright.kernels.checks.losses import cross_entropy_check, lk_check

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "hidden", "vocab", "size"),
    [(5, 70, 300, 1.0), (1, 8, 5, 1.0), (33, 16, 129, 30.0)],
)
def test_linear_cross_entropy(
    tokens: int, hidden: int, vocab: int, size: float, dtype: torch.dtype
) -> None:
    check = cross_entropy_check(tokens, hidden, vocab, dtype, CPU, size)
    assert not failures(verify(check, dtype))


@DTYPES
@pytest.mark.parametrize(("tokens", "hidden", "vocab"), [(5, 70, 300), (1, 8, 5), (34, 16, 129)])
def test_lk_loss(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> None:
    assert not failures(verify(lk_check(tokens, hidden, vocab, dtype, CPU), dtype))


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.integers(1, 40), st.integers(1, 80), st.integers(2, 200))
def test_losses_drawn(tokens: int, hidden: int, vocab: int) -> None:
    for check in (cross_entropy_check, lk_check):
        assert not failures(
            verify(check(tokens, hidden, vocab, torch.float32, CPU), torch.float32)
        )
