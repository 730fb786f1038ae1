"""Rows that this rank's experts hold for the backward pass, beside what even routing gives them.

Which experts tokens choose is known when they run and not before: where experts stand on
several ranks, some ranks hold more rows than the mean, and so more bytes. The rows are
counted here, so that bytes can be held against what is known of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from flopwright.models.moe.module import MixtureOfExperts


@dataclass(slots=True)
class ExpertRows:
    """Counts the rows of experts' inputs that are kept, each storage once.

    Attributes:
        arrived, even: rows held now, and what even routing would give in their place.
    """

    arrived: int = 0
    even: int = 0
    _coming: dict[int, tuple[int, int]] = field(default_factory=dict)
    _held: dict[int, tuple[int, int]] = field(default_factory=dict)

    def share(self) -> float:
        """Returns rows held over even ones; 1 where none are held."""
        return self.arrived / self.even if self.even else 1.0

    def announce(self, address: int, arrived: int, even: int) -> None:
        """Says that the storage at `address` is an expert input of so many rows."""
        self._coming[address] = arrived, even

    def forget(self, address: int) -> None:
        """Takes an announcement back: the storage may be anything from now on."""
        self._coming.pop(address, None)

    def keep(self, address: int) -> None:
        """Counts a storage that is kept, if it was announced."""
        found = self._coming.pop(address, None)
        if found is not None:
            self._held[address] = found
            self.arrived += found[0]
            self.even += found[1]

    def release(self, address: int) -> None:
        """Counts a storage that is let go."""
        arrived, even = self._held.pop(address, (0, 0))
        self.arrived -= arrived
        self.even -= even


@contextmanager
def announcing(modules: Iterable[nn.Module], rows: ExpertRows) -> Iterator[None]:
    """Announces inside what each mixture of experts in the modules gives its experts."""
    hooks: list[Any] = []
    for module in modules:
        for block in module.modules():
            if isinstance(block, MixtureOfExperts):
                hooks += _hooked(block, rows)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hooked(block: MixtureOfExperts, rows: ExpertRows) -> list[Any]:
    even = 0
    parts = block.spec.expert_intermediate_size // block.experts.down_proj.shape[-1]

    def enters(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal even
        (x,) = inputs
        even = x.numel() // x.shape[-1] * block.spec.top_k * parts

    def announces(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        if even:
            rows.announce(_address(inputs[0]), inputs[0].shape[0], even)

    def forgets(_: nn.Module, inputs: tuple[Any, ...], __: Any) -> None:
        rows.forget(_address(inputs[0]))

    first: Callable[..., None] = enters
    return [
        block.register_forward_pre_hook(first),
        block.experts.register_forward_pre_hook(announces),
        block.experts.register_forward_hook(forgets),
    ]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
