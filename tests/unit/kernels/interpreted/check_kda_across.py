"""What carries KDA's state across ranks as Triton kernels. Run by test_in_the_interpreter.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime import interpreter

from flopwright.kernels.kda import across_reference
from flopwright.kernels.kda.across import kda_state_gradient, kda_summary
from flopwright.kernels.kda.across_cost import state_gradient_flops, summary_flops

CHUNK = 16


def _inputs(tokens: int, keys: int, values: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns q, k, v, g, beta and a gradient of the results."""
    made = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(2, tokens, 2, *shape, generator=made)

    narrow = [random(keys), F.normalize(random(keys), dim=-1), random(values), random(values)]
    q, k, v, grad = (t.to(dtype) for t in narrow)
    return [q, k, v, -5 * random(keys).sigmoid(), random().sigmoid(), grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "keys", "values"), [(1, 16, 16), (18, 16, 24), (40, 20, 6)])
def test_both_passes(tokens: int, keys: int, values: int, dtype: torch.dtype) -> None:
    q, k, v, g, beta, grad = _inputs(tokens, keys, values, dtype)
    exact = [t.double() for t in (q, k, v, g, beta, grad)]
    for found, expected in (
        (kda_summary(k, v, g, beta), across_reference.summary(*exact[1:5])),
        (
            kda_state_gradient(grad, q, k, g, beta, 0.3),
            across_reference.state_gradient(exact[5], *exact[:2], *exact[3:5], 0.3),
        ),
    ):
        assert found.dtype == torch.float32
        # Both passes keep fp32 inside whatever the inputs are.
        assert (found.double() - expected).norm() <= 2e-6 * expected.norm()


def test_products_are_those_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    total = [0.0]
    original: Callable[..., object] = interpreter.InterpreterBuilder.create_dot

    def counted(self: object, a: object, b: object, *more: object) -> object:
        rows, inner = a.data.shape  # type: ignore[attr-defined]
        total[0] += 2.0 * rows * inner * b.data.shape[1]  # type: ignore[attr-defined]
        return original(self, a, b, *more)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", counted)
    width, chunks = 16, 2
    q, k, v, g, beta, grad = (
        t[:1, :, :1] for t in _inputs(chunks * CHUNK, width, width, torch.float32)
    )
    pairs = 4 * CHUNK**2 * width  # made without a product
    kda_summary(k, v, g, beta)
    assert total[0] == chunks * (summary_flops(width, width) - pairs)
    total[0] = 0.0
    kda_state_gradient(grad, q, k, g, beta, 0.3)
    assert total[0] == chunks * (state_gradient_flops(width, width) - pairs)
