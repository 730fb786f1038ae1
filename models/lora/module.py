"""Low-rank adapters beside the matrices of a stage's layers (arXiv 2106.09685).

A matrix W has one of W + scale * up @ down; W itself is frozen. Which matrices have one is the
workload's `lora_targets`; routers, indexers, tables and heads never have. Experts have one
each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

from flopwright.models.moe.module import Experts
from flopwright.models.projection.module import Adapter, Projection
from flopwright.models.transformer.init import seeded_generator
from flopwright.models.transformer.module import Stage
from flopwright.spec.parameters import ParamTensor, layer_parameters
from flopwright.spec.workload import LoraTargets

_OF_EXPERTS: Final = {"gate_up_proj": "gate_up_adapter", "down_proj": "down_adapter"}


def wanted(param: ParamTensor, targets: LoraTargets) -> bool:
    """Returns whether a tensor of the model has an adapter."""
    if not param.is_matrix or param.role == "router" or ".indexer." in param.name:
        return False
    if targets == "all":
        return True
    query = param.role == "attention" and not param.name.endswith("o_proj.weight")
    return param.role == "attention" if targets == "attention" else query


def adapters(stage: Stage) -> Iterator[tuple[str, Adapter]]:
    """Yields (name of the adapted tensor, its adapter) of a stage."""
    for path, module in stage.named_modules():
        if isinstance(module, Projection) and module.adapter is not None:
            yield f"{path}.weight", module.adapter
        elif isinstance(module, Experts):
            for leaf, field in _OF_EXPERTS.items():
                own = getattr(module, field)
                if own is not None:
                    yield f"{path}.{leaf}", own


def adapt_(
    stage: Stage,
    rank: int,
    *,
    alpha: float | None = None,
    targets: LoraTargets = "all",
    seed: int = 0,
) -> None:
    """Freezes a stage and puts adapters beside its matrices; only they have gradients then.

    `down` is drawn uniformly within 1 / sqrt(in) by a generator of its own (seed, name, expert),
    whatever the partition; `up` is 0.

    Args:
        alpha: the scale is alpha / rank; None: 1.
    """
    assert not any(True for _ in adapters(stage)), "the stage has adapters already"
    assert stage.tensor.size == 1, "a rank holds whole matrices (executor/launch)"
    scale = 1.0 if alpha is None else alpha / rank
    stage.requires_grad_(False)
    held = dict(stage.named_parameters())
    for layer in stage.layer_numbers:
        for param in layer_parameters(stage.spec, layer):
            if param.name in held and wanted(param, targets):
                _attach(stage, param.name, rank, scale, seed)


def _attach(stage: Stage, name: str, rank: int, scale: float, seed: int) -> None:
    path, leaf = name.rsplit(".", 1)
    module = stage.get_submodule(path)
    if isinstance(module, Experts):
        weight: nn.Parameter = getattr(module, leaf)
        adapter = Adapter(weight, rank, scale)
        setattr(module, _OF_EXPERTS[leaf], adapter)
        numbers: list[int | None] = [module.first_expert + i for i in range(weight.shape[0])]
        parts = list(adapter.down)
    else:
        assert isinstance(module, Projection), name
        adapter = module.adapter = Adapter(module.weight, rank, scale)
        numbers, parts = [None], [adapter.down]
    with torch.no_grad():
        for number, part in zip(numbers, parts, strict=True):
            if part.is_meta:
                continue
            drawn = torch.rand(
                part.shape, generator=seeded_generator(seed, f"{name}.lora", number)
            )
            part.copy_((2 * drawn - 1) / math.sqrt(part.shape[-1]))


@torch.no_grad()
def merge_(stage: Stage) -> None:
    """Adds every adapter to its matrix and takes it away; everything has gradients again."""
    for module in list(stage.modules()):
        if isinstance(module, Projection) and module.adapter is not None:
            module.weight.add_(module.adapter.change())
            module.adapter = None
        elif isinstance(module, Experts):
            for leaf, field in _OF_EXPERTS.items():
                own = getattr(module, field)
                if own is not None:
                    getattr(module, leaf).add_(own.change())
                    setattr(module, field, None)
    stage.requires_grad_(True)
