"""AdamW as it is run: torch's, with decay on matrices only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from flopwright.spec.workload import Optimizer


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Returns two groups: matrices with decay; norms, biases and other vectors without.

    Each group carries "name", "params" and "param_names"; an empty group is left out.
    """
    decayed: list[tuple[str, nn.Parameter]] = []
    plain: list[tuple[str, nn.Parameter]] = []
    for name, p in named:
        (decayed if p.ndim >= 2 else plain).append((name, p))
    groups = (("decay", decayed, weight_decay), ("no_decay", plain, 0.0))
    return [
        {
            "name": label,
            "params": [p for _, p in members],
            "param_names": [n for n, _ in members],
            "weight_decay": decay,
        }
        for label, members, decay in groups
        if members
    ]


def build_optimizer(module: nn.Module, spec: Optimizer, learning_rate: float) -> torch.optim.AdamW:
    """Returns torch's AdamW over the module's parameters."""
    groups = [
        {k: v for k, v in g.items() if k not in {"name", "param_names"}}
        for g in parameter_groups(module.named_parameters(), spec.weight_decay)
    ]
    return torch.optim.AdamW(
        groups, lr=learning_rate, betas=(spec.beta1, spec.beta2), eps=spec.eps
    )
