"""Run by test_in_the_interpreter.py in a process of its own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flopwright.kernels.checks.compare import failures, verify
from flopwright.kernels.checks.losses import cross_entropy_check, lk_check
from flopwright.kernels.linear_cross_entropy.op import linear_cross_entropy
from flopwright.kernels.lk_loss.op import linear_lk_loss

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


def test_lk_loss_of_what_hardly_overlaps() -> None:
    """The overlap is e^-200, less than any fp32 number; by hand: half of each way out."""
    x, w = torch.tensor([[200.0, 0.0]], requires_grad=True), torch.eye(2, requires_grad=True)
    loss, _ = linear_lk_loss(x, w, torch.tensor([[0.0, 200.0]]), torch.eye(2))
    assert loss.item() == pytest.approx(200.0 - math.log(2.0), rel=1e-6)
    of_x, of_w = torch.autograd.grad(loss, (x, w))
    torch.testing.assert_close(of_x, torch.tensor([[0.5, -0.5]]))
    torch.testing.assert_close(
        of_w, torch.tensor([[100.0, 0.0], [-100.0, 0.0]]), rtol=1e-5, atol=1e-5
    )


@DTYPES
def test_lk_loss_of_logits_that_are_large(dtype: torch.dtype) -> None:
    check = lk_check(7, 16, 300, dtype, CPU, size=30.0)
    assert not failures(verify(check, dtype))


def test_targets_outside_the_vocabulary_are_refused() -> None:
    x, w = torch.randn(3, 4), torch.randn(9, 4)
    for wrong in (-100, -1, 9):
        with pytest.raises(IndexError, match=f"target {wrong} is out of bounds: 0 to 8"):
            linear_cross_entropy(x, w, torch.tensor([0, 8, wrong]))


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.integers(1, 40), st.integers(1, 80), st.integers(2, 200))
def test_losses_drawn(tokens: int, hidden: int, vocab: int) -> None:
    for check in (cross_entropy_check, lk_check):
        assert not failures(
            verify(check(tokens, hidden, vocab, torch.float32, CPU), torch.float32)
        )
