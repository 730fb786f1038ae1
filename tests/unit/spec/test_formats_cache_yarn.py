"""Bytes of released weights, of caches, and YaRN's constants, against closed forms."""

import math

import pytest

from flopwright.spec.cache import recurrent_state_bytes, sequence_cache_bytes
from flopwright.spec.flops import training_flops
from flopwright.spec.formats import (
    BF16,
    BLOCK_FP8,
    INT4_G32,
    MXFP4,
    NVFP4,
    mixed_bytes,
    release_bytes,
)
from flopwright.spec.load import load_model
from flopwright.spec.model import YarnScaling
from flopwright.spec.parameters import num_params
from flopwright.spec.yarn import correction_dim, correction_range


@pytest.mark.parametrize(
    ("weight_format", "bits"),
    [(BF16, 16), (BLOCK_FP8, 8 + 32 / 16384), (INT4_G32, 4.5), (MXFP4, 4.25), (NVFP4, 4.5)],
)
def test_bits_per_weight_and_whole_blocks_agree(weight_format, bits) -> None:
    assert weight_format.bits_per_weight == bits
    shape = (3, 256, 512)  # a stack of three matrices of whole blocks
    assert weight_format.tensor_bytes(shape) == math.prod(shape) * bits / 8


def test_edge_blocks_have_a_scale_each() -> None:
    # 129 x 130 needs 2 x 2 blocks of 128 x 128: 4 fp32 scales
    assert BLOCK_FP8.tensor_bytes((129, 130)) == 129 * 130 + 4 * 4


def test_a_bf16_release_is_two_bytes_a_weight() -> None:
    model = load_model("kimi_k2_mini")
    assert release_bytes(model, BF16) == 2 * num_params(model)


def test_int4_touches_experts_alone() -> None:
    model = load_model("kimi_k2_mini")
    moe = model.moe
    assert moe is not None
    experts = (
        model.num_moe_layers
        * moe.num_experts
        * 3
        * moe.expert_intermediate_size
        * model.hidden_size
    )
    expected = 2 * (num_params(model) - experts) + experts * 4.5 / 8
    assert release_bytes(model, INT4_G32) == expected
    assert mixed_bytes(experts, INT4_G32, num_params(model) - experts) == expected


def test_cache_and_state_bytes() -> None:
    model = load_model("kimi_k2_mini")  # 4 layers, latent 64 + rotary 16
    assert sequence_cache_bytes(model, 10) == 10 * 4 * (64 + 16) * 2
    assert recurrent_state_bytes(2, 3, 4, 5, 4) == 2 * 3 * 4 * 5 * 4


def test_training_flops_is_six_nd() -> None:
    assert training_flops(2.0, 5.0) == 60.0


def test_yarn_dimension_inverts_the_wavelength() -> None:
    """Dimension d of a rotary table turns L / (2 pi theta^(2d/width)) times over L tokens."""
    width, theta, length = 64, 50_000.0, 4096
    dim = correction_dim(3.0, width, theta, length)
    turns = length / (2 * math.pi * theta ** (2 * dim / width))
    assert turns == pytest.approx(3.0)


def test_yarn_range_is_ordered_and_clamped() -> None:
    scaling = YarnScaling(factor=40, original_max_seq_len=4096, beta_fast=32, beta_slow=1)
    low, high = correction_range(scaling, 64, 10_000.0)
    assert (low, high) == (10, 23)  # the values DeepSeek-V3's published code computes
    tiny = YarnScaling(factor=2, original_max_seq_len=4, beta_fast=32, beta_slow=1)
    assert correction_range(tiny, 64, 10_000.0)[0] == 0
