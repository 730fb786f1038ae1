"""How evenly a step's tokens fell on the experts of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Balance(NamedTuple):
    """One layer's loads over its mean: 1 and 1 are even; experts that no token chose."""

    max_over_mean: float
    min_over_mean: float
    unused: int


def balances(loads: Mapping[int, Tensor]) -> dict[int, Balance]:
    """Returns the balance by layer of loads [experts] (tokens, whole numbers) by layer."""
    if not loads:
        return {}
    table = torch.stack(list(loads.values())).double()
    mean = table.mean(1).clamp(min=1e-300)
    columns = (table.amax(1) / mean, table.amin(1) / mean, (table == 0).sum(1))
    rows = zip(*(c.tolist() for c in columns), strict=True)
    return {layer: Balance(*row) for layer, row in zip(loads, rows, strict=True)}
