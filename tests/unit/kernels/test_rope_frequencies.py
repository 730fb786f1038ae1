"""YaRN against its published values and a second derivation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flopwright.kernels.rope.frequencies import inverse_frequencies, softmax_scale, table_scale
from flopwright.spec.load import load_model
from flopwright.spec.model import MlaAttention, Rope, YarnScaling


def _k2() -> tuple[Rope, int, YarnScaling]:
    attention = load_model("kimi_k2").attention
    assert isinstance(attention, MlaAttention)
    assert attention.rope.scaling is not None
    return attention.rope, attention.qk_rope_head_dim, attention.rope.scaling


@pytest.mark.parametrize(("factor", "squared"), [(32, 1.8133), (40, 1.8739), (64, 2.0047)])
def test_softmax_scale_of_yarn(factor: float, squared: float) -> None:
    yarn = YarnScaling(factor=factor, original_max_seq_len=4096, mscale_all_dim=1)
    assert softmax_scale(192, yarn) * math.sqrt(192) == pytest.approx(squared, abs=5e-5)
    assert table_scale(yarn) == 1.0


def test_no_scaling_is_the_plain_formula() -> None:
    found = inverse_frequencies(Rope(theta=500.0), 8)
    np.testing.assert_allclose(found, [500 ** (-i / 4) for i in range(4)])
    assert softmax_scale(64, None) == 0.125
    assert table_scale(None) == 1.0


def test_k2_switches_between_pair_19_and_20() -> None:
    rope, width, yarn = _k2()
    plain = inverse_frequencies(Rope(theta=rope.theta), width)
    found = inverse_frequencies(rope, width)
    np.testing.assert_allclose(found[:20], plain[:20])
    np.testing.assert_allclose(found[20:], plain[20:] / yarn.factor)
    # Pair 19.16 is the one that turns once over the original context.
    turns = plain * yarn.original_max_seq_len / (2 * math.pi)
    assert turns[19] > 1 > turns[20]


def test_ramp_between_fast_and_slow_pairs() -> None:
    yarn = YarnScaling(factor=40, original_max_seq_len=4096, beta_fast=32, beta_slow=1)
    theta, width = 10_000.0, 64
    plain = inverse_frequencies(Rope(theta=theta), width)
    found = inverse_frequencies(Rope(theta=theta, scaling=yarn), width)
    turns = plain * 4096 / (2 * math.pi)
    kept, stretched = turns > 32 * 1.34, turns < 1 / 1.34  # a pair more or less: floor and ceil
    np.testing.assert_allclose(found[kept], plain[kept])
    np.testing.assert_allclose(found[stretched], plain[stretched] / 40)
    share = (found / plain)[~kept & ~stretched]
    assert np.all(np.diff(share) <= 1e-12)
    assert np.all((share > 1 / 40 - 1e-12) & (share < 1 + 1e-12))
