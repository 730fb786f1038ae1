"""A trial's state under names and boxes that no plan has a part in, for checkpoints.

What an optimizer updates is a weight, a copy of one, a shard, or a flat partition that begins
and ends inside weights (`parallel/data_parallel/muon_cuts.py` knows which elements); tensor and
expert parallelism have cut the weights before. Here both become boxes of whole tensors: those
that this rank is to write, so that every element is written once, and those that it reads.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from flopwright.executor.checkpoint.boxes import Intervals, TensorSlice, slices_of_run
from flopwright.executor.checkpoint.load import MASTER, OPTIMIZER, load_into
from flopwright.executor.checkpoint.manifest import Manifest
from flopwright.executor.parallel.data_parallel.interface import StatePart
from flopwright.executor.train.trial import DTYPES, Trial
from flopwright.plan.sharding import tensor_cuts
from flopwright.spec.parameters import ParamTensor, parameters

Slices = dict[str, list[TensorSlice]]


@dataclass(slots=True)
class _Found:
    """Boxes by tensor, and counts of steps by weight."""

    slices: Slices = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)


def own_state(trial: Trial) -> tuple[Slices, dict[str, float]]:
    """Returns the boxes that this rank writes (views of what it trains), and single numbers."""
    found = _Found()
    places = _Places(trial)
    narrow = DTYPES[trial.workload.precision.weights]
    for part in trial.data_parallel.state_parts():
        if not places.writes(part):
            continue
        name = part.held.name
        if part.updated.dtype != narrow:
            places.add(found.slices, name, part, part.updated.to(narrow))
            places.add(found.slices, MASTER + name, part, part.updated)
        else:
            places.add(found.slices, name, part, part.updated)
        for kind, tensor in part.state.items():
            places.add(found.slices, f"{OPTIMIZER}{kind}.{name}", part, tensor)
        if part.steps is not None:
            found.scalars[f"{OPTIMIZER}step.{name}"] = float(part.steps)
    if trial.groups.dp_cp.index == 0:
        for name, tensor in _buffers(trial):
            if places.first_of_tp(name):
                found.slices[name] = list(places.boxes(name, tensor.reshape(-1), 0, tensor.shape))
    return found.slices, found.scalars


def load_state(trial: Trial, where: Path, manifest: Manifest) -> None:
    """Goes on from a checkpoint that any plan of the same model and optimizer wrote; collective.

    Raises:
        InputError: something that this trial needs is not in it.
    """
    found, places = Slices(), _Places(trial)
    scalars = manifest.scalars()
    narrow = DTYPES[trial.workload.precision.weights]
    for part in trial.data_parallel.state_parts():
        name = part.held.name
        wide = MASTER if part.updated.dtype != narrow else ""
        places.add(found, wide + name, part, part.updated)
        for kind, tensor in part.state.items():
            places.add(found, f"{OPTIMIZER}{kind}.{name}", part, tensor)
        if part.steps is not None:
            part.steps.fill_(scalars.get(f"{OPTIMIZER}step.{name}", 0.0))
    for name, tensor in _buffers(trial):
        found[name] = list(places.boxes(name, tensor.view(-1), 0, tensor.shape))
    with torch.no_grad():
        load_into(where, manifest, found)
        trial.data_parallel.weights_loaded()


def _buffers(trial: Trial) -> Iterator[tuple[str, Tensor]]:
    """Yields what is not trained but belongs to the model, and a head tied to the embedding."""
    for stage in trial.chunks.values():
        for name, tensor in stage.state_dict().items():
            if name not in trial.trainable.parameters:
                yield name, tensor.detach()


class _Places:
    """Where this rank's parts stand in whole tensors."""

    def __init__(self, trial: Trial) -> None:
        self._trainable, self._groups = trial.trainable, trial.groups
        self._params = {p.name: p for p in parameters(trial.spec)}
        self._intervals: dict[str, tuple[Intervals, ...]] = {}

    def writes(self, part: StatePart) -> bool:
        """Whether of all ranks that hold these elements this is the one that writes them."""
        held, groups = part.held, self._groups
        expert = self._trainable.is_expert(held.name)
        if not expert and not self.first_of_tp(held.name):
            return False
        sharing = self._trainable.sum_group(held.name)
        if held.group.size == 1:  # whole here, as on every one of them: each writes some tensors
            return zlib.crc32(held.name.encode()) % sharing.size == sharing.index
        return held.group.size == sharing.size or groups.dp_replicate.index == 0

    def first_of_tp(self, name: str) -> bool:
        """Whether the tensor is cut over the tensor-parallel ranks, or this is the first."""
        cut = any(c.axis == "tp" for c in tensor_cuts(self._params[name]))
        return cut or self._groups.tp.index == 0

    def add(self, into: Slices, name: str, part: StatePart, flat: Tensor) -> None:
        """Adds a part's boxes to those of tensor `name`."""
        boxes = self.boxes(part.held.name, flat, part.held.run[0], part.held.shape)
        into.setdefault(name, []).extend(boxes)

    def boxes(
        self, weight: str, flat: Tensor, first: int, shape: tuple[int, ...]
    ) -> Iterator[TensorSlice]:
        """Yields elements from `first` on of this rank's part of a weight, of shape `shape`."""
        if weight not in self._intervals:
            self._intervals[weight] = self._cut(self._params[weight])
        full = self._params[weight].shape
        yield from slices_of_run(flat, first, tuple(shape), self._intervals[weight], full)

    def _cut(self, param: ParamTensor) -> tuple[Intervals, ...]:
        groups = {"tp": self._groups.tp, "ep": self._groups.ep, "etp": self._groups.etp}
        found: list[Intervals] = [((0, 0, length),) for length in param.shape]
        for cut in tensor_cuts(param):
            group = groups[cut.axis]
            ranges = cut.ranges(param.shape[cut.dim], group.size, group.index)
            here, intervals = 0, []
            for start, stop in ranges:
                intervals.append((here, start, stop - start))
                here += stop - start
            found[cut.dim] = tuple(intervals)
        return tuple(found)
