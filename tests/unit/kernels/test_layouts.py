"""Ops do not take strides for granted; on a CPU torch's own kernels do.

test_in_the_interpreter.py runs this file once more, in a process where Triton's kernels run.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from flopwright.kernels.attention.block import attention_block, attention_block_backward
from flopwright.kernels.checks import layouts

CPU = torch.device("cpu")
CHECKS = layouts.differentiable_checks(CPU)


@pytest.mark.parametrize("check", CHECKS, ids=[c.name for c in CHECKS])
def test_strides_do_not_change_a_result(check: layouts.Check) -> None:
    found = layouts.results(check, layouts.apart)
    torch.testing.assert_close(found, layouts.results(check, torch.clone), rtol=1e-5, atol=1e-5)


def test_nor_that_of_ops_without_a_gradient() -> None:
    for name, op, args in layouts.plain_calls(CPU):
        found = layouts.call(op, args, layouts.apart)
        expected = layouts.call(op, args, torch.clone)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)


def test_nor_that_of_a_block_of_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 5, 4, 6, generator=generator) for _ in range(4))
    out, lse = attention_block(q, k, v, 0.5, True)
    found = attention_block(*map(layouts.apart, (q, k, v)), 0.5, True)
    torch.testing.assert_close(found, (out, lse))
    tensors = (grad, q, k, v, out, lse)
    found = attention_block_backward(*map(layouts.apart, tensors), 0.5, True)
    torch.testing.assert_close(found, attention_block_backward(*tensors, 0.5, True))
