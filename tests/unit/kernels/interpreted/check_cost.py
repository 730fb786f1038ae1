"""Products that kernels make, counted, against cost.py. Run by test_in_the_interpreter.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from triton.runtime import interpreter

from flopwright.kernels.grouped_gemm.cost import grouped_gemm as grouped_cost
from flopwright.kernels.grouped_gemm.op import grouped_gemm
from flopwright.kernels.kda.cost import CHUNK, chunk_flops
from flopwright.kernels.kda.cost import kda as kda_cost
from flopwright.kernels.kda.op import kda
from flopwright.kernels.linear_cross_entropy.kernel import gradient_part, statistics
from flopwright.kernels.newton_schulz import kernel as schulz
from flopwright.ops import CostBuilder, OpTable, Phase

Count = Callable[[], float]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Returns the FLOPs of all products since it was asked last."""
    total = [0.0]
    original = interpreter.InterpreterBuilder.create_dot

    def counted(self: object, a: object, b: object, *more: object) -> object:
        rows, inner = a.data.shape  # type: ignore[attr-defined]
        total[0] += 2.0 * rows * inner * b.data.shape[1]  # type: ignore[attr-defined]
        return original(self, a, b, *more)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", counted)

    def take() -> float:
        found, total[0] = total[0], 0.0
        return found

    return take


def _rows(add: Callable[[CostBuilder], None]) -> OpTable:
    cost = CostBuilder()
    add(cost)
    return cost.build().ops


def test_linear_attention(products: Count) -> None:
    width, tokens = 16, 3 * CHUNK
    q, k, v = (torch.randn(1, tokens, 1, width) for _ in range(3))
    inputs = [q, F.normalize(k, dim=-1), v, -torch.rand(1, tokens, 1, width),
              torch.rand(1, tokens, 1)]  # fmt: skip
    inputs = [x.requires_grad_() for x in inputs]
    out, _ = kda(*inputs, 0.25)
    forward = products()
    torch.autograd.grad(out.sum(), inputs)
    backward = products()
    rows = _rows(lambda c: kda_cost(
        c, "kda", sequences=1, seq_len=tokens, heads=1, k_width=width, v_width=width,
        dtype="fp32"))  # fmt: skip
    pairs = 3 * CHUNK**2 * width  # of three chunks; made without a product
    assert rows.flops[0, 0] == forward + 4 * pairs
    # The forward pass again, the chunk again, and the gradients of the pairs.
    assert rows.flops[1, 0] == backward + (4 + 4 + 8) * pairs
    assert chunk_flops(width, width)[0] * 3 == rows.flops[0, 0]


def test_grouped_products(products: Count) -> None:
    counts, tile = torch.tensor([32, 0, 64]), 64
    x, w = torch.randn(96, tile).requires_grad_(), torch.randn(3, tile, tile).requires_grad_()
    y = grouped_gemm(x, w, counts)
    forward = products()
    torch.autograd.grad(y.sum(), (x, w))
    rows = _rows(lambda c: grouped_cost(
        c, "g", rows=96, experts=3, k=tile, n=tile, dtype="fp32"))  # fmt: skip
    assert rows.total_flops(Phase.FORWARD).item() == forward
    # Rows of an expert are taken 64 at a time for the weight's gradient: 32 count as 64.
    assert products() == pytest.approx(forward + forward * 128 / 96)


def test_head_and_loss_make_their_logits_twice(products: Count) -> None:
    x, w, targets = torch.randn(32, 64), torch.randn(128, 64), torch.arange(32)
    lse, _ = statistics(x, w, targets)
    once = products()
    gradient_part(x, w, targets, lse, torch.ones(()), 0, 128)
    assert once == products() == 2 * 32 * 64 * 128


def test_symmetric_products_make_half_of_the_tiles(products: Count) -> None:
    tile, n = 32, 4
    x = torch.randn(1, n * tile, 64)
    y = schulz.symmetric(x, 1.0)
    torch.testing.assert_close(y, x @ x.mT)
    assert products() == 2 * (n * tile) ** 2 * 64 * (n + 1) / (2 * n)
