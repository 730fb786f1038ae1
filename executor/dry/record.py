"""Watches every operator of a dry step: what it returns, multiplies and sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flopwright.executor.dry.collectives import read_call
from flopwright.executor.dry.fakes import FastFakes, remembered
from flopwright.executor.dry.memory import StorageMeter
from flopwright.executor.dry.products import reader_of
from flopwright.executor.measure.timers import ActionTimer
from flopwright.plan.schedules.actions import ActionKind
from flopwright.report.rank_step import Call, Product

_DEVICE: Final = torch.ops.prim.device.default


class _Kind(NamedTuple):
    """What an operator is to the recorder."""

    remembered: bool
    collective: str | None
    read_product: Any


class Recorder(TorchDispatchMode):
    """Counts what operators do, by the action of the list that runs them.

    Attributes:
        meter: storages.
        calls, products, flops: since `start`.
    """

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meter = StorageMeter(device.type)
        self.calls: list[Call] = []
        self.products: Counter[Product] = Counter()
        self.flops: Counter[str] = Counter()
        self._fakes = FastFakes(mode)
        self._kinds: dict[Any, _Kind] = {}
        self._action = self._action_kind = ""

    def start(self) -> None:
        """Begins a step: forgets what was before."""
        self.calls.clear()
        self.products.clear()
        self.flops.clear()
        self.meter.start()

    @contextmanager
    def action(self, name: str) -> Iterator[None]:
        """What runs inside is the action's."""
        if not self.meter.boundaries:
            self.meter.boundary("")
        self._action, self._action_kind = name, _kind_name(name)
        try:
            yield
        finally:
            self.meter.boundary(name)
            self._action = self._action_kind = ""

    @contextmanager
    def inner(self, name: str) -> Iterator[None]:
        """What runs inside, within another action, is counted as this one's."""
        outer = self._action, self._action_kind
        self._action, self._action_kind = name, _kind_name(name)
        try:
            yield
        finally:
            self._action, self._action_kind = outer

    def dispatch(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answers an operator; torch calls it by the name `__torch_dispatch__`."""
        if func is _DEVICE:
            return args[0].fake_device
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        if kind.collective is not None:
            call = read_call(kind.collective, args, self._action)
            if call is not None:
                self.calls.append(call)
            return self._fakes.start(func, args, kwargs or {})
        if kind.remembered:
            out = self._fakes.call(func, args, kwargs or {})
        else:
            out = func(*args, **(kwargs or {}))
        if kind.read_product is not None:
            product, flops = kind.read_product(args, out, self._action_kind)
            if flops:  # a chain of two runs has no link to multiply
                self.products[product] += 1
                self.flops[product.kernel] += flops
        self._see(out)
        return out

    def _see(self, out: Any) -> None:
        if isinstance(out, Tensor):
            # of a tensor that is cut over ranks, this rank's part
            self.meter.see(getattr(out, "_local_tensor", out))
        elif isinstance(out, list | tuple):
            for part in out:
                self._see(part)


# Torch keeps its compiler out of every such method by two wrappers, which take longer than
# the answer; nothing here is compiled.
Recorder.__torch_dispatch__ = Recorder.dispatch  # type: ignore[assignment, method-assign]


def _kind_name(action: str) -> str:
    return action.split("(")[0].split("[")[0]


def _kind_of(func: Any) -> _Kind:
    name = func._schema.name
    collective = name.split("::")[1] if func.namespace == "c10d" else None
    return _Kind(remembered(func), collective, reader_of(name) if collective is None else None)


@dataclass(slots=True)
class RecordingTimer(ActionTimer):
    """The trial's timer, telling the recorder which action of the list is running.

    What is timed inside an action of the list is its own, but for what is made again inside a
    backward pass, which is the RECOMPUTE's before it.
    """

    recorder: Recorder | None = field(default=None)
    _depth: int = 0

    @contextmanager
    def action(self, name: str, cls: str, nbytes: int = 0) -> Iterator[None]:
        """Records what runs inside as the action's."""
        assert self.recorder is not None
        within: AbstractContextManager[None] = nullcontext()
        if self._depth == 0:
            within = self.recorder.action(name)
        elif name.startswith(ActionKind.RECOMPUTE.value):
            within = self.recorder.inner(name)
        self._depth += 1
        with within:
            yield
        self._depth -= 1
