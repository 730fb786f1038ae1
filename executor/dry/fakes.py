"""Fake tensors, made faster: what an operator returns for the same shapes is remembered.

Torch's FakeTensorMode decides what every operator returns and keeps a cache of its own, whose
keys take longer to make than the answer. A step of a large plan repeats the same few hundred
calls a hundred thousand times, so what the mode returned once is built again from its shape:
a tensor of its own, a view of an argument, or an argument itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

# What changes the shape of its argument, and so is not answered from memory.
_RESHAPING: Final = ("set_", "resize_", "set_data", "requires_grad_", "detach_")
_NOTHING: Final = object()


class Fresh(NamedTuple):
    """A tensor of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class View(NamedTuple):
    """A tensor on the storage of the leaf `leaf` among the arguments."""

    leaf: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class Same(NamedTuple):
    """The leaf `leaf` among the arguments itself."""

    leaf: int


Recipe = Fresh | View | Same | None
# Shapes alone decide a recipe, so what one rank's step has taught serves the next one's.
_KNOWN: Final[dict[Any, tuple[type | None, tuple[Recipe, ...]]]] = {}


@dataclass(slots=True)
class FastFakes:
    """Answers operators on fake tensors, from memory where it can.

    Attributes:
        mode: decides what an operator returns the first time.
        hits, misses: calls answered from memory, and by the mode.
    """

    mode: FakeTensorMode
    hits: int = 0
    misses: int = 0
    _known: dict[Any, tuple[type | None, tuple[Recipe, ...]]] = field(
        default_factory=lambda: _KNOWN
    )
    _fields: dict[torch.device, dict[str, Any]] = field(default_factory=dict)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what `func` returns on fake tensors."""
        leaves: list[Tensor] = []
        key = _key(func, args, kwargs, leaves)
        known = self._known.get(key, _NOTHING) if key is not None else _NOTHING
        if known is not _NOTHING:
            self.hits += 1
            return self._build(known, leaves)
        self.misses += 1
        out = func(*args, **kwargs)
        if key is not None:
            recipe = _recipe(out, leaves)
            if recipe is not None:
                self._known[key] = recipe
        return out

    def _build(self, known: Any, leaves: list[Tensor]) -> Any:
        container, recipes = known
        if container is None:
            return self._tensor(recipes[0], leaves)
        return container(self._tensor(r, leaves) for r in recipes)

    def _tensor(self, recipe: Recipe, leaves: list[Tensor]) -> Tensor | None:
        if recipe is None:
            return None
        kind = type(recipe)
        if kind is Same:
            return leaves[recipe.leaf]  # type: ignore[union-attr]
        with torch._C._DisableTorchDispatch():  # a meta tensor: no mode has a say in it
            elem = torch.empty_strided(
                recipe.shape if kind is Fresh else (0,),  # type: ignore[union-attr]
                recipe.stride if kind is Fresh else (1,),  # type: ignore[union-attr]
                dtype=recipe.dtype,  # type: ignore[union-attr]
                device="meta",
            )
            if kind is View:
                storage = leaves[recipe.leaf].untyped_storage()  # type: ignore[union-attr]
                elem.set_(storage, recipe.offset, recipe.shape, recipe.stride)  # type: ignore
        return self._fake(elem, recipe.device)  # type: ignore[union-attr]

    def _fake(self, elem: Tensor, device: torch.device) -> Tensor:
        """Returns the fake tensor of a meta tensor, as its much slower constructor would."""
        fields = self._fields.get(device)
        if fields is None:
            made = FakeTensor(self.mode, elem, device)
            self._fields[device] = dict(vars(made))
            return made
        out = torch.Tensor._make_subclass(
            FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device
        )
        out.__dict__.update(fields)
        return out

    def start(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what a collective returns: its arguments' tensors, and a handle to wait for."""
        with in_kernel_invocation_manager(self.mode):
            return func(*args, **kwargs)


def _key(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Tensor]
) -> tuple[Any, ...] | None:
    """Returns what decides the result's shape, None where more does; collects the tensors."""
    key = [func]
    for value in args:
        part = _part(value, leaves)
        if part is _NOTHING:
            return None
        key.append(part)
    for name, value in kwargs.items():
        part = _part(value, leaves)
        if part is _NOTHING:
            return None
        key.append((name, part))
    return tuple(key)


def _part(value: Any, leaves: list[Tensor]) -> Any:
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None:
            return _NOTHING
        leaves.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
    if isinstance(value, Tensor):
        return _NOTHING
    if kind is torch.Generator:
        return kind  # its state decides values only
    if kind is list or kind is tuple:
        parts = [_part(v, leaves) for v in value]
        return _NOTHING if _NOTHING in parts else tuple(parts)
    return kind, value


def _recipe(out: Any, leaves: list[Tensor]) -> tuple[type | None, tuple[Recipe, ...]] | None:
    """Returns how to make `out` again, None where that cannot be told from its shape."""
    if isinstance(out, Tensor) or out is None:
        one = _one(out, leaves)
        return None if one is _NOTHING else (None, (one,))
    if type(out) in {list, tuple}:
        every = tuple(_one(o, leaves) for o in out)
        return None if _NOTHING in every else (type(out), every)
    return None


def _one(out: Any, leaves: list[Tensor]) -> Any:
    if out is None:
        return None
    if type(out) is not FakeTensor or out.constant is not None:
        return _NOTHING
    for i, leaf in enumerate(leaves):
        if leaf is out:
            return Same(i)
    shape, stride, offset = tuple(out.shape), tuple(out.stride()), int(out.storage_offset())
    storage = out.untyped_storage()._cdata
    for i, leaf in enumerate(leaves):
        if leaf.untyped_storage()._cdata == storage:
            return View(i, shape, stride, offset, out.dtype, out.fake_device)
    if offset:
        return _NOTHING
    return Fresh(shape, stride, out.dtype, out.fake_device)


def remembered(func: Any) -> bool:
    """Returns whether an operator's result may be answered from memory."""
    return func.namespace != "c10d" and not any(
        func._schema.name.endswith(f"::{name}") for name in _RESHAPING
    )
