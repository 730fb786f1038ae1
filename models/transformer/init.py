"""First weights: the same bits whatever the partition."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from flopwright.models.moe.module import Experts
from flopwright.models.slices import Places, own_part
from flopwright.plan.sharding import tensor_cuts
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import ParamTensor, parameters

_WHOLE: Final[Places] = {"tp": (1, 0), "ep": (1, 0), "etp": (1, 0)}


def weight_std(spec: ModelSpec, name: str) -> float:
    """Returns the standard deviation of a matrix's first values.

    0.5 / sqrt(hidden) (0.006 at DeepSeek-V3's width, as in arXiv 2412.19437); what is added
    to the residual stream 2 * num_layers times is smaller by the root of that.
    """
    if "conv1d" in name and spec.linear_attention is not None:
        return 1 / math.sqrt(3 * spec.linear_attention.conv_kernel)
    if "_res_proj" in name:  # every source weighs the same at first
        return 0.0
    std = 0.5 / math.sqrt(spec.hidden_size)
    into_latent = "routed_expert_down_proj" in name
    added = ("o_proj", "down_proj", "routed_expert_up_proj")
    if any(part in name for part in added) and not into_latent:
        std /= math.sqrt(2 * spec.num_layers)
    return std


def seeded_generator(seed: int, name: str, expert: int | None) -> torch.Generator:
    """Returns the generator of a tensor's first values: its own, whatever the partition."""
    text = f"{seed}/{name}" + ("" if expert is None else f"/{expert}")
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _drawn(shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    # Drawn on the CPU in fp32, so that device and dtype do not change the draw.
    return torch.randn(shape, generator=generator).mul_(std)


# Steps that a decay begins with, drawn log-uniformly, and the rates of softplus decays.
_STEPS: Final = (0.001, 0.1)
_RATES: Final = (1.0, 16.0)


def decay_values(
    spec: ModelSpec, shape: tuple[int, ...], leaf: str, seed: int, name: str
) -> Tensor:
    """Returns the first values of a KDA block's A_log or dt_bias, fp32.

    b is the inverse softplus of a step. The bounded form begins with A_log 0 (arXiv
    2607.24653), the other with the logarithm of a rate; both as the released code has them.
    """
    assert spec.linear_attention is not None
    bound = spec.linear_attention.decay_lower_bound
    uniform = torch.rand(shape, generator=seeded_generator(seed, name, None))
    if leaf == "A_log":
        if bound is not None:
            return torch.zeros(shape)
        return (_RATES[0] + uniform * (_RATES[1] - _RATES[0])).log()
    low, high = (math.log(step) for step in _STEPS)
    step = (low + uniform * (high - low)).exp()
    return step + torch.log(-torch.expm1(-step))


@dataclass(frozen=True)
class _Draw:
    """First values of a stage's matrices: each a rank's part of the whole matrix's.

    Attributes:
        first: number of the first expert here, by the name of a stacked tensor.
    """

    spec: ModelSpec
    seed: int
    places: Places
    first: dict[str, int]
    tensors: dict[str, ParamTensor]

    def fill_(self, name: str, p: Tensor) -> None:
        std, whole = weight_std(self.spec, name), self.tensors.get(name)
        if name in self.first:
            cuts = () if whole is None else tensor_cuts(whole)[1:]
            shape = tuple(p.shape[1:]) if whole is None else whole.shape[1:]
            for i in range(p.shape[0]):
                generator = seeded_generator(self.seed, name, self.first[name] + i)
                drawn = _drawn(shape, std, generator).unsqueeze(0)
                p[i].copy_(own_part(drawn, cuts, self.places).squeeze(0))
            return
        tied = name == "lm_head.weight" and self.spec.tied_embeddings
        source = "model.embed_tokens.weight" if tied else name
        shape = tuple(p.shape) if whole is None else whole.shape
        drawn = _drawn(shape, std, seeded_generator(self.seed, source, None))
        p.copy_(drawn if whole is None else own_part(drawn, tensor_cuts(whole), self.places))


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
    places: Places = getattr(module, "places", _WHOLE)
    draw = _Draw(spec, seed, places, first, {p.name: p for p in parameters(spec)})
    for name, p in module.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf in {"A_log", "dt_bias"}:
            whole = draw.tensors[name]
            values = decay_values(spec, whole.shape, leaf, seed, name)
            p.copy_(own_part(values, tensor_cuts(whole), places))
        elif leaf.endswith("_bias"):  # those of experts are stacked
            p.zero_()
        elif p.ndim == 1:
            p.fill_(0.0 if leaf in {"bias", "sinks"} else 1.0)
        else:
            draw.fill_(name, p)
    for _name, b in module.named_buffers():
        b.zero_()
