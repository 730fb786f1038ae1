"""Run by test_in_the_interpreter.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flopwright.kernels.balance_histogram import reference as histogram
from flopwright.kernels.balance_histogram.op import balance_histogram
from flopwright.kernels.fp8_quantize import op as fp8
from flopwright.kernels.fp8_quantize import reference as fp8_reference
from flopwright.kernels.mx_quantize import reference as mx
from flopwright.kernels.mx_quantize.op import mx_fake_quantize
from flopwright.kernels.swiglu.situ import gated_fp8

LOST, HUGE = float("nan"), float("inf")


def _numbers(*bad: float) -> Tensor:
    """Returns rows of more than a tile; the first tile of the first has the bad numbers."""
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    x[0, 5 : 5 + len(bad)] = torch.tensor(bad)
    return x


@pytest.mark.parametrize("element", mx.ELEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_microscaling_keeps_infinity_and_loses_a_block_with_nan(
    element: str, dtype: torch.dtype
) -> None:
    huge = _numbers(HUGE, -HUGE).to(dtype)
    found = mx_fake_quantize(huge, element)
    assert torch.equal(found.isinf(), huge.isinf())
    assert found[0, 5] == HUGE
    assert found[0, 6] == -HUGE
    assert torch.equal(found, mx.fake_quantize(huge, element))
    lost = mx_fake_quantize(_numbers(LOST).to(dtype), element)
    assert lost[0, :32].isnan().all()
    assert not lost[0, 32:].isnan().any()
    assert not lost[1:].isnan().any()


def test_fp8_tells_of_nan() -> None:
    for bad in ((LOST,), (HUGE,), (LOST, HUGE)):
        x = _numbers(*bad)
        for op, back, exact in (
            (fp8.quantize, fp8.dequantize, fp8_reference.quantize),
            (fp8.quantize_blocks, fp8.dequantize_blocks, fp8_reference.quantize_blocks),
        ):
            codes, scales = op(x)
            torch.testing.assert_close(scales, exact(x)[1], equal_nan=True)
            assert torch.equal(codes.float().isnan(), exact(x)[0].float().isnan())
            found = back(codes, scales, torch.float32)
            assert not found[0, 5].isfinite()  # the interpreter reads NaN's code as a number
            assert found[:, 128:].isfinite().all()


def test_what_a_gate_keeps_tells_of_nan() -> None:
    _, codes, scales, other, other_scales = gated_fp8(_numbers(LOST), _numbers(), [])
    assert scales[0, 0].isnan()
    assert codes[0, :128].float().isnan().all()
    assert not scales.flatten()[1:].isnan().any()
    assert not other.float().isnan().any()
    assert not other_scales.isnan().any()


def test_a_score_that_is_no_number_counts_in_the_last_bin() -> None:
    scores = torch.rand(40, 5, generator=torch.Generator().manual_seed(0))
    alpha = scores.max(1).values
    scores[3, 1], alpha[7] = LOST, LOST
    scores[5, 2], scores[6, 2] = HUGE, -HUGE
    found = balance_histogram(scores, alpha, -1.0, 1.0, 10)
    assert torch.equal(found, histogram.histogram(scores, alpha, -1.0, 1.0, 10))
    assert (found.sum(1) == 40).all()
    assert found[1, -1] == 2
