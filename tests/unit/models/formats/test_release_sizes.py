"""Sizes of published checkpoints as closed forms of the catalog's models, no tensor made."""

from __future__ import annotations

import pytest

from flopwright.simulator.rollouts.engine.catalog import load_served
from flopwright.simulator.rollouts.engine.weights import gpu_weight_bytes
from flopwright.spec.formats import BF16, BLOCK_FP8, INT4_G32, MXFP4, WeightFormat, release_bytes
from flopwright.spec.load import load_model
from flopwright.spec.parameters import num_params, parameters
from flopwright.spec.rollouts.engine_served import EngineShape


@pytest.mark.parametrize(
    ("model", "form", "published", "tolerance"),
    [
        ("kimi_k3", MXFP4, 1.560e12, 3.3e-4),
        ("kimi_k3", BF16, 5.56e12, 9e-4),
        ("kimi_k3", BLOCK_FP8, 2.82e12, 0.015),  # of a re-quantisation, with its vision tower
        ("kimi_k2", INT4_G32, 594.2e9, 8.5e-5),  # Kimi-K2-Thinking
        ("kimi_k2", BLOCK_FP8, 1.03e12, 5e-3),
        ("gpt_oss_120b", MXFP4, 60.8 * 2**30, 9e-4),  # GiB in arXiv 2508.10925, table 1
        ("gpt_oss_20b", MXFP4, 12.8 * 2**30, 4e-3),
    ],
)
def test_published_sizes(
    model: str, form: WeightFormat, published: float, tolerance: float
) -> None:
    assert release_bytes(load_model(model), form) == pytest.approx(published, rel=tolerance)


def test_deepseek_v3_with_its_prediction_layer() -> None:
    """685B weights stand on disk: the layer's copies of embedding and head are among them."""
    spec = load_model("deepseek_v3_mtp")
    copies = 2 * spec.vocab_size * spec.hidden_size
    assert num_params(spec) + copies == pytest.approx(685e9, rel=1e-3)
    plain = sum(
        p.numel for p in parameters(spec) if p.role not in BLOCK_FP8.roles or len(p.shape) < 2
    )
    covered = num_params(spec) - plain
    scales = release_bytes(spec, BLOCK_FP8) - covered - 2 * plain
    # A block has one fp32 scale; edge blocks are few.
    assert scales == pytest.approx(covered * 4 / 128**2, rel=1e-3)


@pytest.mark.parametrize("form", ["bf16", "block_fp8", "int4_g32", "mxfp4"])
@pytest.mark.parametrize("model", ["kimi_k2", "deepseek_v3", "kimi_k3"])
def test_a_served_model_takes_its_checkpoints_bytes(model: str, form: str) -> None:
    spec = load_model(model)
    formats = {f.name: f for f in (BF16, BLOCK_FP8, INT4_G32, MXFP4)}
    served = gpu_weight_bytes(load_served(model, form), EngineShape())  # type: ignore[arg-type]
    whole = release_bytes(spec, formats[form])
    # An engine's matrices alone; norms, biases and the like are in the checkpoint besides.
    assert served == pytest.approx(whole, rel=2e-3)
