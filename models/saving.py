"""Which tensors a forward pass keeps for its backward, and which are made again or narrowed.

Modules name their regions: `region("norm", self.norm, x)` is the call `self.norm(x)` whose
results a policy that drops the group "norm" does not keep. Without a policy (no `Saver` is
entered) every function here calls straight through, and the graph is the plain one.

What a dropped region saves inside, and its results where operators outside save them, are
let go; the first backward that needs one of them runs the region again from its inputs, once,
with gradients on, and takes tensors by the order in which they are saved (as torch's
non-reentrant checkpoint does, whose early stop is left out: a region runs again whole, as
cost.py says). Inputs of a region may themselves be dropped, narrowed or on the host.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from flopwright.models.saving_keepers import Cell, Keeper, Narrowed, Storage, storage_of

T = TypeVar("T")
Again = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingPolicy:
    """What a plan says of saved tensors (plan/parallel.py).

    Attributes:
        recompute: "selective" drops the regions of `groups`, "full" all of a layer.
        layers: "full" for the first so many layers of a stage, None for all.
        fp8: FP8 storage of what modules mark with `narrow`.
    """

    recompute: Literal["none", "selective", "full"] = "none"
    groups: frozenset[str] = frozenset()
    layers: int | None = None
    fp8: bool = False

    @property
    def plain(self) -> bool:
        """Whether everything is kept as it is."""
        return self.recompute == "none" and not self.fp8

    def drops(self, groups: Sequence[str]) -> bool:
        """Returns whether a region of these groups is made again."""
        return self.recompute == "selective" and not self.groups.isdisjoint(groups)

    def drops_layer(self, place: int) -> bool:
        """Returns whether the layer at `place` (0-based in its stage) keeps only its input."""
        return self.recompute == "full" and (self.layers is None or place < self.layers)


class _State(threading.local):
    """What runs in this thread: autograd has threads of its own for GPUs."""

    saver: Saver | None = None
    again: _Region | None = None


_STATE = _State()


def region(groups: str | tuple[str, ...], fn: Callable[..., T], *inputs: Any, keep: int = 0) -> T:
    """Returns fn(*inputs), whose saved tensors go where the policy drops one of the groups.

    Args:
        fn: deterministic; it must take every tensor it reads as an input (parameters and
            buffers apart), not close over it.
        keep: the first so many results stay although the region is dropped.
    """
    saver = _STATE.saver
    if saver is None or not drops(groups):
        return fn(*inputs)
    return saver.dropped(fn, inputs, keep)


def drops(groups: str | tuple[str, ...]) -> bool:
    """Returns whether a region of these groups that begins here is dropped."""
    saver = _STATE.saver
    names = (groups,) if isinstance(groups, str) else groups
    return saver is not None and saver.may_drop and saver.policy.drops(names)


def layer_region(place: int, layer: nn.Module, *inputs: Any) -> Any:
    """Returns layer(*inputs) at `place` in its stage: "full" keeps its input only.

    It runs again inside its own backward, without the hooks of the call: what shards weights
    has already gathered them for the backward, and would let go of them behind a second call.
    """
    saver = _STATE.saver
    if saver is None or not saver.may_drop or not saver.policy.drops_layer(place):
        return layer(*inputs)
    # What it returns is the next layer's input, and stays.
    return saver.dropped(layer, inputs, keep=1, again=layer.forward)


def narrow(tensor: Tensor) -> Tensor:
    """Returns the tensor, which FP8 activation storage keeps narrow where an operator saves it."""
    saver = _STATE.saver
    if saver is not None and saver.policy.fp8 and saver.may_drop:
        saver.narrow(tensor)
    return tensor


def keeps_narrow(groups: str | tuple[str, ...]) -> bool:
    """Returns whether FP8 storage holds here for a region of these groups that is not dropped."""
    saver = _STATE.saver
    return saver is not None and saver.policy.fp8 and saver.may_drop and not drops(groups)


def narrow_already(*tensors: Tensor) -> None:
    """Says of tensors that an operator has just saved that they are the narrow ones: they stay."""
    saver = _STATE.saver
    if saver is not None:
        for tensor in tensors:
            saver.stays(tensor)


def stands(tensor: Tensor) -> Tensor:
    """Returns the tensor, a derived table that stands anyway: no region that saves it makes it."""
    saver = _STATE.saver
    if saver is not None and torch.is_grad_enabled():
        saver.stands(tensor)
    return tensor


def running_again() -> bool:
    """Returns whether a dropped region runs a second time: counters must not count it."""
    return _STATE.again is not None


def remembered(value: T) -> T:
    """Returns `value`; when a dropped region runs again, what it was the first time.

    For what a module is told from outside and that may have changed by the backward.
    """
    if _STATE.again is not None:
        return next(_STATE.again.notes)  # type: ignore[no-any-return]
    if _STATE.saver is not None and _STATE.saver.inside is not None:
        _STATE.saver.inside.kept_notes.append(value)
    return value


@dataclass(slots=True)
class Saver:
    """Saved tensors of one forward pass (of one chunk and micro-batch).

    Attributes:
        again: entered around what runs a second time, to time it.
        watch: called with each tensor that is kept; what it returns lives as long.
        inside: the dropped region that runs now.
    """

    policy: SavingPolicy
    again: Again = nullcontext
    watch: Callable[[Tensor], object] | None = None
    inside: _Region | None = None
    _known: dict[int, tuple[Storage, Keeper]] = field(default_factory=dict)

    @property
    def may_drop(self) -> bool:
        """Whether a region may begin: gradients are on and no dropped region is around it."""
        return self.inside is None and torch.is_grad_enabled()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Holds for the forward pass that runs inside."""
        before, _STATE.saver = _STATE.saver, self
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            _STATE.saver = before
            self._known.clear()

    def kept(self) -> list[Keeper]:
        """Returns what the forward pass keeps as it is so far; call it inside `forward`."""
        return [k for _, k in self._known.values() if k.plain]

    def dropped(
        self,
        fn: Callable[..., T],
        inputs: tuple[Any, ...],
        keep: int = 0,
        again: Callable[..., T] | None = None,
    ) -> T:
        """Returns fn(*inputs) and keeps its inputs in place of what it saves.

        `again` is called instead of `fn` the second time.
        """
        held = tuple(self._hold(i) if isinstance(i, Tensor) else i for i in inputs)
        self.inside = mine = _Region(again or fn, held, self.again)
        try:
            out = fn(*inputs)
        finally:
            self.inside = None
        for place, value in enumerate(out if isinstance(out, tuple) else (out,)):
            if not isinstance(value, Tensor):
                continue
            known = self._find(value)
            if place < keep:  # who saves it later keeps it
                if known is not None and known.source is mine:
                    self._keep(value, known)
            elif known is None:
                self._learn(value, mine.keeper(-1 - place))
        return out

    def narrow(self, tensor: Tensor) -> None:
        """Remembers that a tensor is kept in FP8 once an operator or a region keeps it."""
        if self._find(tensor) is None:
            self._learn(tensor, Narrowed(self.watch))

    def stays(self, tensor: Tensor) -> None:
        """Remembers that a kept tensor does not move to the host."""
        keeper = self._find(tensor)
        if keeper is not None:
            keeper.stays = True

    def stands(self, tensor: Tensor) -> None:
        """Remembers a tensor that is nobody's to drop, and no activation."""
        if self._find(tensor) is None:
            self._learn(tensor, Keeper()).hold(tensor.detach())

    def _pack(self, tensor: Tensor) -> Tensor | Cell:
        mine = self.inside
        place = -1 if mine is None else mine.next_place()
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        keeper = self._find(tensor)
        if keeper is None and mine is not None:
            keeper = mine.keeper(place)
            self._learn(tensor, keeper)
        elif keeper is None:
            keeper = self._keep(tensor)
        keeper.kept(tensor)
        return Cell.of(keeper, tensor)

    def _hold(self, tensor: Tensor) -> Cell:
        keeper = self._find(tensor) or self._keep(tensor)
        keeper.kept(tensor)
        return Cell.of(keeper, tensor)

    def _keep(self, tensor: Tensor, keeper: Keeper | None = None) -> Keeper:
        keeper = keeper or self._learn(tensor, Keeper())
        keeper.hold(tensor.detach(), self.watch)
        return keeper

    def _find(self, tensor: Tensor) -> Keeper | None:
        found = self._known.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def _learn(self, tensor: Tensor, keeper: Keeper) -> Keeper:
        # A weak reference to the storage keeps its address from being taken by another one.
        storage = storage_of(tensor)
        self._known[storage.cdata] = (storage, keeper)
        return keeper


def _unpack(saved: Tensor | Cell) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.get()


class _Region:
    """A dropped region: how to run it again, and who waits for what it then saves or returns.

    Places are those of saved tensors, in order from 0; results are at -1, -2 and so on.
    """

    def __init__(self, fn: Callable[..., Any], held: tuple[Any, ...], again: Again) -> None:
        self._fn, self._held, self._again = fn, held, again
        self._waiting: dict[int, weakref.ref[Keeper]] = {}
        self._saved = 0
        self.kept_notes: list[Any] = []
        self.notes: Iterator[Any] = iter(())

    def next_place(self) -> int:
        """Returns the place of the tensor that is saved next."""
        self._saved += 1
        return self._saved - 1

    def keeper(self, place: int) -> Keeper:
        """Returns a new keeper of what stands at `place`."""
        keeper = Keeper(self)
        self._waiting[place] = weakref.ref(keeper)
        return keeper

    def bring(self, keeper: Keeper) -> None:
        """Runs the region again and hands every keeper that is left its tensor."""
        inputs = [_leaf(h) if isinstance(h, Cell) else h for h in self._held]
        waiting = {p: k for p, ref in self._waiting.items() if (k := ref()) is not None}
        counter = iter(range(self._saved))

        def pack(tensor: Tensor) -> None:
            waits = waiting.pop(next(counter), None)
            if waits is not None and waits.tensor is None:
                waits.hold(tensor.detach())

        before, self.notes = (_STATE.saver, _STATE.again), iter(self.kept_notes)
        _STATE.saver, _STATE.again = None, self
        try:
            with self._again(), torch.enable_grad(), saved_tensors_hooks(pack, _unpack):
                out = self._fn(*inputs)
        finally:
            _STATE.saver, _STATE.again = before
        for place, value in enumerate(out if isinstance(out, tuple) else (out,)):
            waits = waiting.pop(-1 - place, None)
            if waits is not None:
                waits.hold(value.detach())
        assert next(counter, None) is None, "a region did not run as before"
        assert not waiting, "a region did not run as before"
        self._held, self._fn = (), _spent
        self.kept_notes, self.notes = [], iter(())
        self._waiting.clear()
        assert keeper.tensor is not None


def _leaf(cell: Cell) -> Tensor:
    """Returns a region's input as a leaf of a graph of its own."""
    return cell.get().detach().requires_grad_(cell.requires_grad)


def _spent(*_: Any) -> None:
    raise AssertionError("a region runs again only once")
