"""Kimi K3's vision tower: its weights and products, against a tower put together from torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopwright.errors import InputError
from flopwright.models.hf.config import import_config
from flopwright.models.hf.config_out import hf_config
from flopwright.models.vision.cost import (
    ImageSize,
    image_cost,
    image_flops,
    kept_bytes,
    projector_params,
    tower_params,
)
from flopwright.ops import OpKind, Phase
from flopwright.spec.load import load_model
from flopwright.spec.parameters import num_params
from flopwright.spec.vision import VisionTower


def _k3() -> VisionTower:
    tower = load_model("kimi_k3").vision
    assert tower is not None
    return tower


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm0, self.norm1 = nn.RMSNorm(1024), nn.RMSNorm(1024)
        self.wqkv, self.wo = nn.Linear(1024, 4608, bias=False), nn.Linear(1536, 1024, bias=False)
        self.up, self.down = nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.wqkv(self.norm0(x)).view(b, s, 3, 12, 128).unbind(2)
        scores = torch.einsum("bshd,bthd->bhst", q, k).softmax(-1)
        x = x + self.wo(torch.einsum("bhst,bthd->bshd", scores, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm1(x))))


class _Tower(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * 14 * 14, 1024, bias=False)
        self.positions = nn.Parameter(torch.empty(64, 64, 1024))
        self.layers = nn.ModuleList(_Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(1024)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class _Projector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4096, 4096, bias=False)
        self.second = nn.Linear(4096, 7168, bias=False)
        self.norm = nn.RMSNorm(7168)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(F.gelu(self.first(x))))


def test_weights_are_the_published_401_million() -> None:
    with torch.device("meta"):
        tower, projector = _Tower(27), _Projector()
    own = sum(p.numel() for p in tower.parameters())
    assert tower_params(_k3()) == own == 401_214_464
    assert projector_params(_k3(), 7168) == sum(p.numel() for p in projector.parameters())
    assert num_params(load_model("kimi_k3")) == 2_779_484_476_000  # of the text model


def test_flops_of_an_image(flop_counter: Any) -> None:
    with torch.device("meta"):
        tower, projector = _Tower(27), _Projector()
    image = ImageSize(448, 448)
    patches, tokens = image.patches(_k3()), image.tokens(_k3())
    assert (patches, tokens) == (1024, 256)
    x = torch.empty(1, patches, 588, device="meta").requires_grad_()
    with flop_counter() as counted:
        out = projector(tower(x).view(1, tokens, 4096))
    assert image_flops(_k3(), 7168, patches) == counted.flops
    with flop_counter() as backward:
        out.backward(torch.empty_like(out))
    ops = image_cost(_k3(), 7168, patches).ops
    found = ops.total_flops(Phase.BACKWARD_INPUT) + ops.total_flops(Phase.BACKWARD_WEIGHT)
    # A fused kernel computes the scores once more.
    attention = (ops.kind == OpKind.ATTENTION) & (ops.phase == Phase.FORWARD)
    again = (ops.flops * ops.count)[attention].sum() / 2
    assert found.item() == backward.flops + again


def test_sides_are_filled_up_to_whole_tokens() -> None:
    assert ImageSize(225, 223).tokens(_k3()) == 9 * 8
    assert ImageSize(14, 14).patches(_k3()) == 4


def test_kept_bytes_grow_with_the_patches_alone() -> None:
    one, two = kept_bytes(_k3(), 7168, 1024), kept_bytes(_k3(), 7168, 2048)
    assert two == 2 * one
    # A layer keeps four states, queries, keys and values, what attention gives, and two inner.
    layer = 4 * 1024 + 3 * 1536 + 1536 + 2 * 4096
    assert one == pytest.approx(1024 * 27 * layer * 2, rel=0.03)


def test_a_config_json_says_it_both_ways() -> None:
    spec = load_model("kimi_k3")
    config = hf_config(spec)
    assert config["vision_config"]["qkv_hidden_size"] == 1536
    found = import_config(config)
    assert found.spec.vision == spec.vision
    broken = config | {"vision_config": config["vision_config"] | {"mlp_type": "mlp3"}}
    with pytest.raises(InputError, match="mlp_type"):
        import_config(broken)


def test_predictions_say_that_it_is_not_in_them() -> None:
    from flopwright.simulator.training.assumptions import _vision

    (text,) = _vision(load_model("kimi_k3"))
    assert "447 million weights" in text
    assert not list(_vision(load_model("kimi_k2")))
