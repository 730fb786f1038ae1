"""Run by test_in_the_interpreter.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flopwright.kernels.checks.compare import failures, verify
from flopwright.kernels.checks.experts import grouped_gemm_check, permute_check, unpermute_check

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize(
    ("counts", "inner", "out"),
    [
        ([40, 40, 40], 64, 96),
        ([0, 70, 0, 1, 33], 65, 17),  # empty experts, odd sizes
        ([0, 0, 1], 7, 5),  # one token
        ([5, 0], 130, 3),
    ],
)
def test_grouped_gemm(counts: list[int], inner: int, out: int, dtype: torch.dtype) -> None:
    assert not failures(verify(grouped_gemm_check(counts, inner, out, dtype, CPU), dtype))


@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    st.lists(st.integers(0, 45), min_size=1, max_size=5).filter(sum),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_grouped_gemm_drawn(counts: list[int], inner: int, out: int, dtype: torch.dtype) -> None:
    assert not failures(verify(grouped_gemm_check(counts, inner, out, dtype, CPU), dtype))


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "width"), [(6, 2, 5, 33), (1, 1, 3, 8), (9, 3, 4, 130)]
)
def test_permute_and_back(
    tokens: int, top_k: int, experts: int, width: int, dtype: torch.dtype
) -> None:
    for check in (permute_check, unpermute_check):
        made = check(tokens, top_k, experts, width, dtype, CPU)
        assert not failures(verify(made, dtype))
