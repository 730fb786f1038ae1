"""How a released tensor's numbers lie, against the parts that they are here."""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.errors import InputError, Violation
from flopwright.models.hf.names import Stored, is_padded


def to_rows(stored: Stored, tensor: Tensor) -> Tensor:
    """Returns a released tensor as its parts below each other."""
    if is_padded(stored):
        return _without_padding(stored, tensor)
    if not stored.stacked:
        return tensor.t() if stored.transposed else tensor
    if stored.transposed:
        tensor = tensor.transpose(1, 2)
    if stored.alternating:
        tensor = torch.cat((tensor[:, ::2], tensor[:, 1::2]), 1)
    return tensor.flatten(0, 1)


def _without_padding(stored: Stored, tensor: Tensor) -> Tensor:
    """Returns a vector without the zeros behind it.

    Raises:
        InputError: they are no zeros.
    """
    count = stored.numel
    if tensor[count:].any():
        rule, limit = "numbers stand behind the last head", f"{count} heads"
        raise InputError(Violation(field=stored.name, rule=rule, limit=limit))
    return tensor[:count]


def from_rows(stored: Stored, rows: Tensor) -> Tensor:
    """Returns the released tensor of parts below each other."""
    if not stored.stacked:
        return rows.t().contiguous() if stored.transposed else rows.reshape(stored.shape)
    count = len(stored.parts)
    tensor = rows.reshape(count, -1, *rows.shape[1:])
    if stored.alternating:
        halves = tensor.reshape(count, 2, -1, *rows.shape[1:])
        tensor = halves.transpose(1, 2).flatten(1, 2)
    return (tensor.transpose(1, 2) if stored.transposed else tensor).contiguous()
