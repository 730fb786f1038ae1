"""Many plans as one struct of arrays: what the evaluator prices in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal, cast, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flopwright.errors import InputError, Violation
from flopwright.plan.parallel import ParallelPlan, RecomputeName, ScheduleName

Ints = NDArray[np.int64]

SCHEDULES: Final[tuple[ScheduleName, ...]] = get_args(ScheduleName)
RECOMPUTES: Final[tuple[RecomputeName, ...]] = ("none", "selective", "full")
DATA_PARALLELS: Final[tuple[Literal["deepspeed", "fsdp2", "none"], ...]] = (
    "deepspeed",
    "fsdp2",
    "none",
)
# Value of an axis that `build` is not given.
_DEFAULTS: Final = {"schedule": SCHEDULES.index("1f1b"), "zero_stage": 0, "layout": -1}
_FLAGS: Final = ("fp8_activations", "activation_offload", "optimizer_offload")
_ZERO_BASED: Final = (*_FLAGS, "zero_stage", "schedule", "recompute", "data_parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Plans by axis; every array has one entry a plan.

    Attributes:
        schedule, recompute, data_parallel: index into SCHEDULES, RECOMPUTES, DATA_PARALLELS.
        fp8_activations, activation_offload, optimizer_offload: 0 or 1.
        layout: index into `layouts`, -1 where layers are spread evenly.
        layouts: layers of each chunk, the plans' `layers_per_stage`.
    """

    dp_replicate: Ints
    dp_shard: Ints
    tp: Ints
    pp: Ints
    vpp: Ints
    cp: Ints
    ep: Ints
    micro_batch_size: Ints
    zero_stage: Ints
    schedule: Ints
    recompute: Ints
    data_parallel: Ints
    fp8_activations: Ints
    activation_offload: Ints
    optimizer_offload: Ints
    layout: Ints
    layouts: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def build(cls, layouts: Sequence[tuple[int, ...]] = (), **axes: ArrayLike) -> Candidates:
        """Returns candidates from arrays that broadcast; an axis not given is 1, 0 or its default.

        Raises:
            InputError: an unknown axis, a value below its least, or shapes that do not fit.
        """
        names = axis_names()
        unknown = [k for k in axes if k not in names]
        if unknown:
            raise InputError([Violation(field=k, rule="not an axis of a plan") for k in unknown])
        full = {n: axes.get(n, _DEFAULTS.get(n, 0 if n in _ZERO_BASED else 1)) for n in names}
        try:
            columns = np.broadcast_arrays(*(np.atleast_1d(full[n]) for n in names))
        except ValueError as error:
            raise InputError(f"the axes of the candidates differ in length: {error}") from error
        arrays = {
            n: np.ascontiguousarray(c, dtype=np.int64) for n, c in zip(names, columns, strict=True)
        }
        _check(arrays, len(layouts))
        return cls(**arrays, layouts=tuple(layouts))

    @classmethod
    def from_plans(cls, plans: Iterable[ParallelPlan]) -> Candidates:
        """Returns the plans as candidates, in order."""
        plans = tuple(plans)
        layouts = tuple(dict.fromkeys(p.layers_per_stage for p in plans if p.layers_per_stage))
        columns: dict[str, list[int]] = {n: [] for n in axis_names()}
        for plan in plans:
            for name in columns:
                columns[name].append(_code(plan, name, layouts))
        return cls.build(layouts, **columns)

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def dp(self) -> Ints:
        """Data-parallel size by candidate."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> Ints:
        """Ranks by candidate."""
        return self.dp * self.tp * self.cp * self.pp

    def num_microbatches(self, global_batch_size: int) -> Ints:
        """Returns the micro-batches a rank runs in a step, by candidate."""
        return global_batch_size // (self.micro_batch_size * self.dp)

    def take(self, index: ArrayLike) -> Candidates:
        """Returns the candidates at `index` (integers or a mask)."""
        i = np.asarray(index)
        return Candidates(**{n: getattr(self, n)[i] for n in axis_names()}, layouts=self.layouts)

    def plan(self, i: int) -> ParallelPlan:
        """Returns candidate `i` as a plan."""
        plain = {
            n: int(getattr(self, n)[i])
            for n in ("dp_replicate", "dp_shard", "tp", "pp", "vpp", "cp", "ep")
        }
        layout = int(self.layout[i])
        return ParallelPlan(
            **plain,
            micro_batch_size=int(self.micro_batch_size[i]),
            zero_stage=cast(Literal[0, 1, 2, 3], int(self.zero_stage[i])),
            schedule=SCHEDULES[int(self.schedule[i])],
            recompute=RECOMPUTES[int(self.recompute[i])],
            data_parallel=DATA_PARALLELS[int(self.data_parallel[i])],
            layers_per_stage=None if layout < 0 else self.layouts[layout],
            fp8_activations=bool(self.fp8_activations[i]),
            activation_offload=bool(self.activation_offload[i]),
            optimizer_offload=bool(self.optimizer_offload[i]),
        )


def distinct(*columns: Ints) -> tuple[Ints, Ints]:
    """Returns (where each distinct combination first stands, which one each row has)."""
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, place = np.unique(column, return_inverse=True)
        code = code * len(values) + place.reshape(-1)
    _, first, index = np.unique(code, return_index=True, return_inverse=True)
    return first.astype(np.int64), index.reshape(-1).astype(np.int64)


def axis_names() -> tuple[str, ...]:
    """Returns the names of the array fields of Candidates."""
    return tuple(f.name for f in fields(Candidates) if f.name != "layouts")


def _code(plan: ParallelPlan, name: str, layouts: tuple[tuple[int, ...], ...]) -> int:
    if name == "schedule":
        return SCHEDULES.index(plan.schedule)
    if name == "recompute":
        return RECOMPUTES.index(plan.recompute)
    if name == "data_parallel":
        return DATA_PARALLELS.index(plan.data_parallel)
    if name == "layout":
        return layouts.index(plan.layers_per_stage) if plan.layers_per_stage else -1
    return int(getattr(plan, name))


def _check(arrays: dict[str, Ints], num_layouts: int) -> None:
    highest = {
        "schedule": len(SCHEDULES) - 1,
        "recompute": len(RECOMPUTES) - 1,
        "data_parallel": len(DATA_PARALLELS) - 1,
        "zero_stage": 3,
        "layout": num_layouts - 1,
        **dict.fromkeys(_FLAGS, 1),
    }
    broken = []
    for name, values in arrays.items():
        low = -1 if name == "layout" else 0 if name in _ZERO_BASED else 1
        high = highest.get(name)
        bad = (values < low) | ((values > high) if high is not None else False)
        if bad.any():
            limit = f"{low} to {high}" if high is not None else f"at least {low}"
            broken.append(
                Violation(field=name, value=str(values[bad][0]), rule="out of range", limit=limit)
            )
    if broken:
        raise InputError(broken)
