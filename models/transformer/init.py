"""First weights: the same bits whatever the partition."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from flopwright.models.moe.module import Experts
from flopwright.spec.model import ModelSpec


def weight_std(spec: ModelSpec, name: str) -> float:
    """Returns the standard deviation of a matrix's first values.

    0.5 / sqrt(hidden) (0.006 at DeepSeek-V3's width, as in arXiv 2412.19437); what is added
    to the residual stream 2 * num_layers times is smaller by the root of that.
    """
    std = 0.5 / math.sqrt(spec.hidden_size)
    if "o_proj" in name or "down_proj" in name:
        std /= math.sqrt(2 * spec.num_layers)
    return std


def _generator(seed: int, name: str, expert: int | None) -> torch.Generator:
    text = f"{seed}/{name}" + ("" if expert is None else f"/{expert}")
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _normal_(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    # Drawn on the CPU in fp32, so that device and dtype do not change the draw.
    tensor.copy_(torch.randn(tensor.shape, generator=generator).mul_(std))


@torch.no_grad()
def init_weights_(module: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Fills the weights of a stage: norms 1, biases 0, matrices normal with `weight_std`.

    Every tensor draws from its own generator, seeded by (seed, full name) and for an expert
    by its global number too: any split of the model starts from bit-identical weights.
    """
    first = {
        f"{name}.{leaf}": m.first_expert
        for name, m in module.named_modules()
        if isinstance(m, Experts)
        for leaf in ("gate_up_proj", "down_proj")
    }
    for name, p in module.named_parameters():
        if name in first:
            for i in range(p.shape[0]):
                expert = first[name] + i
                _normal_(p[i], weight_std(spec, name), _generator(seed, name, expert))
        elif p.ndim == 1:
            p.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            tied = name == "lm_head.weight" and spec.tied_embeddings
            source = "model.embed_tokens.weight" if tied else name
            _normal_(p, weight_std(spec, name), _generator(seed, source, None))
    for _name, b in module.named_buffers():
        b.zero_()
