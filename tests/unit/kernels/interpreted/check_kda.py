"""Run by test_in_the_interpreter.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flopwright.kernels.checks.compare import failures, verify
from flopwright.kernels.checks.kda import kda_check

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "widths", "forgetting"),
    [
        ((1, 37, 1), (16, 20), 1.0),  # three chunks, the last one short
        ((1, 16, 2), (24, 16), 0.05),
        ((2, 1, 1), (8, 8), 1.0),  # one token
        ((1, 20, 1), (16, 16), 40.0),  # a channel forgets all within a chunk
    ],
    ids=str,
)
def test_kda(
    shape: tuple[int, int, int], widths: tuple[int, int], forgetting: float, dtype: torch.dtype
) -> None:
    assert not failures(verify(kda_check(shape, widths, dtype, CPU, forgetting), dtype))


@pytest.mark.parametrize("seed", [151732048, 1000])
def test_decays_of_channels_that_forget(seed: int) -> None:
    """Their gradients are small beside what a token is to itself, which must not come in."""
    check = kda_check((1, 18, 1), (16, 16), torch.float32, CPU, 40.0, seed)
    assert not failures(verify(check, torch.float32, seed))


@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.integers(1, 33), st.integers(1, 20), st.integers(1, 80))
def test_kda_drawn(tokens: int, k_width: int, v_width: int) -> None:
    check = kda_check((1, tokens, 1), (k_width, v_width), torch.float32, CPU)
    assert not failures(verify(check, torch.float32))
