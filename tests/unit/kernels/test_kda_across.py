"""KDA over runs that different ranks hold, against token after token in one place."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.kda.across import kda_carried, kda_state_gradient, kda_summary
from flopwright.kernels.kda.op import kda, kda_backward
from flopwright.kernels.kda.reference import recurrent

BATCH, HEADS, KEYS, VALUES, SCALE = 2, 3, 6, 4, 0.4


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def all(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def run(self, place: int, length: int) -> Inputs:
        part = slice(place * length, (place + 1) * length)
        return Inputs(*(t[:, part] for t in self.all()))


def drawn(tokens: int, forgetting: float = 1.0) -> Inputs:
    made = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(BATCH, tokens, HEADS, *shape, generator=made, dtype=torch.float64)

    return Inputs(
        random(KEYS), F.normalize(random(KEYS), dim=-1), random(VALUES),
        -forgetting * random(KEYS).sigmoid(), random().sigmoid(),
    )  # fmt: skip


def zeros() -> Tensor:
    return torch.zeros(BATCH, HEADS, KEYS, VALUES, dtype=torch.float64)


@pytest.mark.parametrize(("runs", "length"), [(2, 20), (4, 16), (8, 5), (6, 1), (1, 30)])
def test_states_before_runs_are_those_of_the_whole_sequence(runs: int, length: int) -> None:
    x = drawn(runs * length)
    summaries = [kda_summary(r.k, r.v, r.g, r.beta) for r in _runs(x, runs, length)]
    found = kda_carried(summaries, list(range(runs)), False)
    state = zeros()
    for place, run in enumerate(_runs(x, runs, length)):
        torch.testing.assert_close(found[place], state, rtol=1e-12, atol=1e-13)
        out, _ = kda(*run.all(), SCALE, found[place])
        expected, state = recurrent(*run.all(), SCALE, state)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("forgetting", [0.01, 1.0, 5.0])
@pytest.mark.parametrize(("runs", "length"), [(2, 20), (4, 16), (8, 3), (1, 30)])
def test_gradients_are_those_of_the_whole_sequence(
    runs: int, length: int, forgetting: float
) -> None:
    x = drawn(runs * length, forgetting)
    leaves = [t.clone().requires_grad_() for t in x.all()]
    out, _ = recurrent(*leaves, SCALE, zeros())
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    expected = torch.autograd.grad(out, leaves, grad)
    parts = _runs(x, runs, length)
    grads = grad.split(length, 1)
    summaries = [kda_summary(r.k, r.v, r.g, r.beta) for r in parts]
    before = kda_carried(summaries, list(range(runs)), False)
    asked = [
        kda_state_gradient(d, r.q, r.k, r.g, r.beta, SCALE)
        for d, r in zip(grads, parts, strict=True)
    ]
    backward = [torch.cat((a, s[..., VALUES:]), -1) for a, s in zip(asked, summaries, strict=True)]
    behind = kda_carried(backward, list(range(runs)), True)
    assert not behind[-1].any()
    found = [
        kda_backward(grads[i], behind[i], *r.all(), SCALE, before[i])[:5]
        for i, r in enumerate(parts)
    ]
    for of_runs, whole in zip(zip(*found, strict=True), expected, strict=True):
        joined = torch.cat(of_runs, 1)
        assert (joined - whole).norm() <= 1e-12 * whole.norm()


def test_a_rank_takes_only_its_own_runs() -> None:
    summaries = [torch.randn(1, 2, 3, 5, dtype=torch.float64) for _ in range(6)]
    for back in (False, True):
        whole = kda_carried(summaries, list(range(6)), back)
        assert torch.equal(kda_carried(summaries, [1, 4], back), whole[[1, 4]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_are_at_least_fp32(dtype: torch.dtype) -> None:
    x = Inputs(*(t.to(dtype) for t in drawn(20).all()))
    exact = Inputs(*(t.double() for t in x.all()))
    narrow = kda_summary(x.k, x.v, x.g.float(), x.beta.float())
    wide = kda_summary(exact.k, exact.v, exact.g, exact.beta)
    assert narrow.dtype == torch.float32
    assert (narrow - wide).norm() <= 1e-6 * wide.norm()


def _runs(x: Inputs, runs: int, length: int) -> list[Inputs]:
    return [x.run(place, length) for place in range(runs)]
