"""What a rank keeps of its micro-batches between forward and backward, as the plan says.

Recompute and FP8 storage happen inside the passes (models/saving.py): a RECOMPUTE action has
nothing to do by itself, what is made again is made when the backward needs it, layer by layer,
and is timed under the action's name. OFFLOAD and FETCH move what a pass keeps as it is to host
memory and back: on GPUs on two copy streams beside the compute, on CPUs by plain copies. What
FP8 storage has narrowed stays where it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from flopwright.executor.parallel.copies import Copies, copies_for
from flopwright.models.saving import Saver, SavingPolicy
from flopwright.models.saving_keepers import Keeper, Watch
from flopwright.plan.parallel import SELECTIVE_TAGS, ParallelPlan
from flopwright.plan.schedules.actions import Action, ActionKind

Key = tuple[int, int]  # chunk, micro-batch


class Clock(Protocol):
    """What the store needs of the action timer."""

    def action(self, name: str, cls: str, nbytes: int = 0) -> AbstractContextManager[None]:
        """Times what runs inside."""
        ...


def policy_of(plan: ParallelPlan) -> SavingPolicy:
    """Returns what a plan says of saved tensors, offload apart."""
    groups = frozenset(plan.recompute_tags) or SELECTIVE_TAGS
    return SavingPolicy(
        recompute=plan.recompute,
        groups=groups if plan.recompute == "selective" else frozenset(),
        layers=plan.recompute_layers,
        fp8=plan.fp8_activations,
    )


@dataclass(slots=True)
class ActivationStore:
    """Saved activations of one rank by (chunk, micro-batch).

    Attributes:
        chunks: modules by chunk; their parameters, buffers and constants never move.
        watch: called with each tensor that is kept here, while what it returns lives
            (executor/measure/memory.py); saved_tensors_hooks outside of this store see nothing
            of what it keeps.
    """

    plan: ParallelPlan
    chunks: Mapping[int, nn.Module]
    timer: Clock
    device: torch.device
    watch: Watch | None = None
    _policy: SavingPolicy = field(init=False)
    _copies: Copies = field(init=False)
    _kept: dict[Key, list[weakref.ref[Keeper]]] = field(default_factory=dict)
    _away: dict[Key, list[_OnHost]] = field(default_factory=dict)
    _on_host: weakref.WeakSet[_OnHost] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self._policy, self._copies = policy_of(self.plan), copies_for(self.device)

    def hooks(self) -> dict[ActionKind, Callable[[Action], None]]:
        """Returns what serves the runner's actions on saved tensors."""
        return {
            ActionKind.RECOMPUTE: lambda a: self.recompute(a.chunk, a.microbatch),
            ActionKind.OFFLOAD: lambda a: self.offload(a.chunk, a.microbatch),
            ActionKind.FETCH: lambda a: self.fetch(a.chunk, a.microbatch),
        }

    def forward(self, chunk: int, microbatch: int) -> AbstractContextManager[None]:
        """Returns what is entered around a forward pass, the loss included."""
        if self._policy.plain and not self.plan.activation_offload:
            return nullcontext()
        return self._forward((chunk, microbatch))

    @contextmanager
    def _forward(self, key: Key) -> Iterator[None]:
        self._copies.make_room()
        saver = Saver(self._policy, lambda: self._again(key), self.watch)
        with saver.forward():
            yield
            if self.plan.activation_offload:
                self._kept[key] = [weakref.ref(k) for k in saver.kept()]

    def backward(self, chunk: int, microbatch: int) -> AbstractContextManager[None]:
        """Returns what is entered around a backward pass, or each half of a split one."""
        self._kept.pop((chunk, microbatch), None)
        self._away.pop((chunk, microbatch), None)
        return nullcontext()

    def recompute(self, chunk: int, microbatch: int) -> None:
        """Does nothing: the backward that follows makes again what it needs, when it does."""

    def offload(self, chunk: int, microbatch: int) -> None:
        """Starts the way of a micro-batch's kept tensors to host memory and lets them go."""
        key = (chunk, microbatch)
        stays = _addresses(self.chunks[chunk])
        leaving = [
            k
            for ref in self._kept.pop(key)
            if (k := ref()) is not None
            and k.tensor is not None
            and k.tensor.untyped_storage()._cdata not in stays
        ]
        self._away[key] = [self._park(keeper) for keeper in leaving]
        self._copies.left()

    def fetch(self, chunk: int, microbatch: int) -> None:
        """Starts their way back."""
        for parked in self._away.pop((chunk, microbatch)):
            parked.fetch()

    def _park(self, keeper: Keeper) -> _OnHost:
        assert keeper.tensor is not None
        flat = _whole(keeper.tensor)
        parked = _OnHost(self, self._copies.out(flat), weakref.ref(keeper))
        self._on_host.add(parked)
        keeper.leave(parked)
        return parked

    def host_tensors(self) -> list[Tensor]:
        """Returns what stands in host memory now."""
        return [parked.host for parked in self._on_host]

    def copy_back(self, host: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Returns a tensor that `host` is being copied to, and what waits for the copy."""
        return self._copies.back(host)

    def _again(self, key: Key) -> AbstractContextManager[None]:
        return self.timer.action(str(Action(ActionKind.RECOMPUTE, *key)), "recompute")


class _OnHost:
    """Where a keeper's tensor is while it is away."""

    def __init__(self, store: ActivationStore, host: Tensor, keeper: weakref.ref[Keeper]) -> None:
        self.host = host
        self._store, self._keeper = store, keeper
        self._back: tuple[Tensor, Callable[[], None]] | None = None
        self._watched: object = None

    def fetch(self) -> None:
        """Starts the copy, if somebody still needs the tensor."""
        keeper = self._keeper()
        if keeper is not None and self._back is None:
            self._back = self._store.copy_back(self.host)
            watch = self._store.watch
            self._watched = None if watch is None else watch(self._back[0])

    def bring(self, keeper: Keeper) -> None:
        """Hands the tensor over once it has come."""
        self.fetch()
        assert self._back is not None
        tensor, wait = self._back
        wait()
        keeper.hold(tensor, self._store.watch)


def _whole(tensor: Tensor) -> Tensor:
    """Returns all of the memory that a tensor is a view of, as numbers in a row."""
    numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((numbers,), (1,), 0)


def _addresses(module: nn.Module) -> frozenset[int]:
    """Returns the memory of what a module owns: parameters, buffers and derived tables."""
    constants = getattr(module, "constants", list)
    owned = (*module.parameters(), *module.buffers(), *constants())
    return frozenset(t.untyped_storage()._cdata for t in owned)
