"""What a vision tower and its projector weigh, cost an image and keep of it (arXiv 2607.24653).

Layers are pre-norm (RMSNorm): attention over all patches of an image, without a mask, and two
matrices with a GELU between them; no biases. Behind the last norm merge x merge patches stand
side by side and pass two matrices with a GELU between them, and a norm, in the text model's
width. Nothing here is built or trained: there is no module to hold it equal to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flopwright.kernels.linear.cost import linear
from flopwright.kernels.memory_bound import memory_bound
from flopwright.kernels.rms_norm.cost import rms_norm, wide_bytes
from flopwright.ops import BlockCost, CostBuilder, OpKind, Phase
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.vision import VisionTower


def tower_params(tower: VisionTower) -> int:
    """Returns the weights of the tower, its projector left out."""
    hidden, wide = tower.hidden_size, tower.qkv_size
    layer = 4 * hidden * wide + 2 * hidden * tower.intermediate_size + 2 * hidden
    positions = tower.position_table**2 * hidden
    return tower.num_layers * layer + tower.patch_values * hidden + positions + hidden


def projector_params(tower: VisionTower, text_hidden: int) -> int:
    """Returns the weights between the tower and a text model of that width."""
    merged = tower.merged_size
    return merged * merged + merged * text_hidden + text_hidden


@dataclass(frozen=True, slots=True)
class ImageSize:
    """An image in pixels; sides are filled up to whole tokens."""

    height: int
    width: int

    def patches(self, tower: VisionTower) -> int:
        """Returns its patches."""
        return self.tokens(tower) * tower.merge**2

    def tokens(self, tower: VisionTower) -> int:
        """Returns the tokens that the text model reads for it."""
        side = tower.patch_size * tower.merge
        return math.ceil(self.height / side) * math.ceil(self.width / side)


def image_cost(
    tower: VisionTower, text_hidden: int, patches: int, dtype: str = "bf16", images: int = 1
) -> BlockCost:
    """Returns the rows of images of so many patches each, forward and backward.

    Its lives are what a backward pass would need; a tower that is frozen keeps none of them.
    """
    cost, n = CostBuilder(), float(images * patches)
    hidden, width = tower.hidden_size, DTYPE_BYTES[dtype]
    linear(cost, "patch_embed", rows=n, k=tower.patch_values, n=hidden, dtype=dtype)
    cost.saved("patch_embed.input", n * tower.patch_values * width)
    layer = CostBuilder()
    _layer(layer, tower, images, patches, dtype)
    cost.extend(layer.build(1), "layers.", float(tower.num_layers))
    rms_norm(cost, "final_norm", rows=n, width=hidden, dtype=dtype)
    cost.saved("final_norm.input", n * hidden * width)
    _projector(cost, tower, text_hidden, n / tower.merge**2, dtype)
    return cost.build(1)


def _layer(cost: CostBuilder, tower: VisionTower, images: int, patches: int, dtype: str) -> None:
    n, hidden, wide = float(images * patches), tower.hidden_size, tower.qkv_size
    inner, width = tower.intermediate_size, DTYPE_BYTES[dtype]
    for name in ("norm0", "norm1"):
        rms_norm(cost, name, rows=n, width=hidden, dtype=dtype)
        cost.saved(f"{name}.input", n * hidden * width)
        cost.saved(f"{name}.out", n * hidden * width)
    linear(cost, "wqkv", rows=n, k=hidden, n=3 * wide, dtype=dtype)
    cost.saved("qkv", n * 3 * wide * width)
    _attention(cost, tower, images, patches, dtype)
    linear(cost, "wo", rows=n, k=wide, n=hidden, dtype=dtype)
    linear(cost, "mlp.up", rows=n, k=hidden, n=inner, dtype=dtype)
    _gelu(cost, "mlp.gelu", n * inner, dtype)
    linear(cost, "mlp.down", rows=n, k=inner, n=hidden, dtype=dtype)
    cost.saved("mlp.up.out", n * inner * width)
    cost.saved("mlp.gelu.out", n * inner * width)


def _attention(
    cost: CostBuilder, tower: VisionTower, images: int, patches: int, dtype: str
) -> None:
    """Adds fused attention without a mask: every patch sees every patch of its image."""
    pairs, head = float(images * patches**2), tower.qkv_size // tower.num_heads
    values = images * patches * tower.qkv_size * DTYPE_BYTES[dtype]
    sums = images * patches * tower.num_heads * wide_bytes(dtype)
    for phase, products, read, written in (
        (Phase.FORWARD, 2, 3 * values, values + sums),
        (Phase.BACKWARD_INPUT, 5, 5 * values + sums, 3 * values),
    ):
        cost.op(
            "attention", OpKind.ATTENTION, phase, dtype=dtype, read_bytes=read,
            flops=2 * products * pairs * tower.qkv_size, m=patches, n=patches, k=head,
            batch=images * tower.num_heads, written_bytes=written,
        )  # fmt: skip
    cost.saved("attention.out", values)
    cost.saved("attention.lse", sums)


def _projector(
    cost: CostBuilder, tower: VisionTower, text_hidden: int, tokens: float, dtype: str
) -> None:
    merged, width = tower.merged_size, DTYPE_BYTES[dtype]
    cost.saved("projector.input", tokens * merged * width)
    linear(cost, "projector.first", rows=tokens, k=merged, n=merged, dtype=dtype)
    _gelu(cost, "projector.gelu", tokens * merged, dtype)
    cost.saved("projector.first.out", tokens * merged * width)
    cost.saved("projector.gelu.out", tokens * merged * width)
    linear(cost, "projector.second", rows=tokens, k=merged, n=text_hidden, dtype=dtype)
    rms_norm(cost, "projector.norm", rows=tokens, width=text_hidden, dtype=dtype)
    cost.saved("projector.norm.input", tokens * text_hidden * width)


def _gelu(cost: CostBuilder, name: str, elements: float, dtype: str) -> None:
    nbytes = elements * DTYPE_BYTES[dtype]
    for phase, reads in ((Phase.FORWARD, 1), (Phase.BACKWARD_INPUT, 2)):
        memory_bound(
            cost, name, phase, dtype=dtype, elements=elements, read_bytes=reads * nbytes,
            written_bytes=nbytes,
        )  # fmt: skip


def image_flops(tower: VisionTower, text_hidden: int, patches: int) -> float:
    """Returns the FLOPs of one image forward: products, and attention of the whole square."""
    return float(image_cost(tower, text_hidden, patches).ops.total_flops(Phase.FORWARD)[0])


def kept_bytes(tower: VisionTower, text_hidden: int, patches: int, dtype: str = "bf16") -> float:
    """Returns what a backward pass through the tower would keep of one image."""
    return float(np.sum(image_cost(tower, text_hidden, patches, dtype).lives.bytes))
