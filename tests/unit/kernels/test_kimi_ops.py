"""Gradients of the ops of Kimi Linear and Kimi K3 by differences, and their plain forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.attention.cached import cached_attention
from flopwright.kernels.attention.reference import hidden_keys
from flopwright.kernels.attention.sinks import attention_with_sinks
from flopwright.kernels.attn_res.op import attn_res
from flopwright.kernels.expert_bias.op import expert_bias
from flopwright.kernels.kda.op import kda
from flopwright.kernels.kda_gate.op import kda_gate
from flopwright.kernels.output_gate.op import gated_norm, sigmoid_gate
from flopwright.kernels.relu2.op import relu2
from flopwright.kernels.short_conv.op import short_conv
from flopwright.kernels.swiglu import reference as swiglu
from flopwright.kernels.swiglu.clamped import clamped_glu_packed
from flopwright.kernels.swiglu.situ_packed import situ_glu_packed


def _random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


COUNTS = torch.tensor([2, 0, 3])
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "short_conv": (lambda x, w: short_conv(x, w, 0), (_random(2, 5, 6), _random(6, 1, 3))),
    "short_conv_normed": (lambda x, w: short_conv(x, w, 3), (_random(2, 5, 6), _random(6, 1, 3))),
    "short_conv_behind": (
        lambda x, w, s: short_conv(x, w, 3, s),
        (_random(2, 5, 6), _random(6, 1, 3), _random(2, 2, 6)),
    ),
    "decay": (lambda *t: kda_gate(*t, 0.0), (_random(2, 3, 6), _random(2), _random(6))),
    "bounded_decay": (lambda *t: kda_gate(*t, -5.0), (_random(2, 3, 6), _random(2), _random(6))),
    "sigmoid_gate": (sigmoid_gate, (_random(2, 3, 4), _random(2, 3, 4, seed=1))),
    "gated_norm": (
        lambda *t: gated_norm(*t, 1e-5),
        (_random(2, 3, 4), _random(2, 3, 4, seed=1), _random(4, seed=2)),
    ),
    "attn_res": (
        lambda a, b, c, q, w: attn_res([a, b, c], q, w, 1e-5),
        (*(_random(2, 3, 4, seed=i) for i in range(3)), _random(1, 4), _random(4)),
    ),
    "relu2": (relu2, (_random(3, 8),)),
    "sinks": (
        lambda *t: attention_with_sinks(*t, 0.5, 3)[0],
        (*(_random(2, 6, h, 4, seed=h) for h in (4, 2, 2)), _random(4)),
    ),
    "clamped_glu": (lambda x: clamped_glu_packed(x, 1.0), (_random(3, 8),)),
    "expert_bias": (
        lambda x, b: expert_bias(x, b, COUNTS.to(x.device)),
        (_random(5, 4), _random(3, 4)),
    ),
    "situ_glu_packed": (lambda x: situ_glu_packed(x, 4.0, 25.0), (_random(3, 8),)),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_by_differences(name: str) -> None:
    op, inputs = CASES[name]
    assert torch.autograd.gradcheck(op, inputs)


@pytest.mark.parametrize("name", CASES)
def test_results_without_data_have_the_same_shape_and_dtype(name: str) -> None:
    op, inputs = CASES[name]
    real, fake = op(*inputs), op(*(x.to("meta") for x in inputs))
    assert (real.shape, real.dtype) == (fake.shape, fake.dtype)


def test_short_convolution_is_torchs() -> None:
    x, w = _random(2, 7, 6), _random(6, 1, 4)
    expected = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), w, groups=6)).mT
    torch.testing.assert_close(short_conv(x, w, 0), expected)
    heads = expected.unflatten(-1, (2, 3))
    unit = heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(short_conv(x, w, 3), unit.flatten(-2))
    # Cut in two, the second half behind the first one's last inputs.
    second = short_conv(x[:, 4:], w, 3, x[:, 1:4])
    torch.testing.assert_close(second, unit.flatten(-2)[:, 4:])


def test_decays_are_negative_and_bounded() -> None:
    z, a, b = _random(1, 64, 8) * 20, _random(2), _random(8)
    bounded = kda_gate(z, a, b, -5.0)
    assert bounded.min() >= -5.0
    assert bounded.max() <= 0.0
    u = (z + b).view(1, 64, 2, 4)
    rate = a.exp().view(2, 1)
    torch.testing.assert_close(kda_gate(z, a, b, 0.0), -rate * F.softplus(u))
    torch.testing.assert_close(bounded, -5.0 * torch.sigmoid(rate * u))


def test_decays_of_channels_that_forget() -> None:
    """The gradient of a slow decay keeps its digits beside fast ones, to 1e-4 of its own size."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 16, 1, 4, generator=generator).double() for _ in range(3))
    g = torch.full((1, 16, 1, 4), -14.0, dtype=torch.float64)  # e^-14 from one token to the next
    tensors = [t.float() for t in (q, F.normalize(k, dim=-1), v, g, g[..., 0].sigmoid() + 0.5)]
    found = []
    for leaves in (tensors, [t.double() for t in tensors]):
        leaves = [t.clone().requires_grad_() for t in leaves]
        (of_g,) = torch.autograd.grad(kda(*leaves, 0.5)[0].sum(), leaves[3])
        found.append(of_g.double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-12)


def test_gates_are_their_products() -> None:
    x, gate, weight = _random(2, 3, 4), _random(2, 3, 4, seed=1), _random(4, seed=2)
    torch.testing.assert_close(sigmoid_gate(x, gate), x * gate.sigmoid())
    expected = F.rms_norm(x, (4,), weight, 1e-5) * gate.sigmoid()
    torch.testing.assert_close(gated_norm(x, gate, weight, 1e-5), expected)


def test_mixture_over_depth_is_attention_over_sources() -> None:
    sources = [_random(2, 3, 4, seed=i) for i in range(5)]
    query, weight = _random(1, 4, seed=7), _random(4, seed=8)
    together = torch.stack(sources, -2)
    keys = F.rms_norm(together, (4,), weight, 1e-5)
    expected = F.scaled_dot_product_attention(
        query.expand(2, 3, 1, 4), keys, together, scale=1.0
    ).squeeze(-2)
    torch.testing.assert_close(attn_res(sources, query, weight, 1e-5), expected)
    alone = attn_res(sources[:1], query, weight, 1e-5)
    torch.testing.assert_close(alone, sources[0], rtol=0, atol=0)


def test_packed_activation_is_the_unpacked_one() -> None:
    x = _random(5, 12)
    torch.testing.assert_close(
        situ_glu_packed(x, 4.0, 25.0), swiglu.situ_glu(*x.chunk(2, -1), 4.0, 25.0)
    )
    assert situ_glu_packed(x * 1e3, 4.0, 25.0).abs().max() <= 100


@pytest.mark.parametrize("window", [0, 3])
def test_a_sink_is_one_more_logit_without_a_value(window: int) -> None:
    q, k, v = (_random(2, 6, 4, 4, seed=i) for i in range(3))
    sinks = _random(4, seed=9)
    scores = torch.einsum("bshd,bthd->bhst", q, k) * 0.5
    hidden = hidden_keys(6, 6, window, q.device)
    scores = scores.masked_fill(hidden, float("-inf"))
    column = sinks.view(1, 4, 1, 1).expand(2, 4, 6, 1)
    shares = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    expected = torch.einsum("bhst,bthd->bshd", shares, v)
    found, lse = attention_with_sinks(q, k, v, sinks, 0.5, window)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(lse, torch.cat((scores, column), -1).logsumexp(-1))
    last = cached_attention(q[:, 4:], k, v, 0.5, window, sinks)
    torch.testing.assert_close(last, expected[:, 4:])
    alone = cached_attention(q, k, v, 0.5, window, sinks)
    torch.testing.assert_close(alone, expected)
