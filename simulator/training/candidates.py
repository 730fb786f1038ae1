"""Many plans as one struct of arrays: what the evaluator prices in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flopwright.errors import InputError, Violation
from flopwright.plan.parallel import ContextName, ParallelPlan, RecomputeName, ScheduleName

Ints = NDArray[np.int64]

SCHEDULES: Final[tuple[ScheduleName, ...]] = get_args(ScheduleName)
RECOMPUTES: Final[tuple[RecomputeName, ...]] = ("none", "selective", "full")
DATA_PARALLELS: Final[tuple[Literal["deepspeed", "fsdp2", "none"], ...]] = (
    "deepspeed",
    "fsdp2",
    "none",
)
CONTEXTS: Final[tuple[ContextName, ...]] = ("ring", "all_gather", "ulysses")
# Value of an axis that `build` is not given.
_DEFAULTS: Final = {
    "schedule": SCHEDULES.index("1f1b"),
    "zero_stage": 0,
    "layout": -1,
    "sequence_parallel": 1,
    "recompute_tags": -1,
    "recompute_layers": -1,
}
_FLAGS: Final = (
    "fp8_activations",
    "activation_offload",
    "optimizer_offload",
    "gradient_offload",
    "parameter_offload",
    "fused_loss",
    "sequence_parallel",
)
_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "schedule": SCHEDULES,
    "recompute": RECOMPUTES,
    "data_parallel": DATA_PARALLELS,
    "context_parallel": CONTEXTS,
}
_ZERO_BASED: Final = (*_FLAGS, "zero_stage", *_CHOICES)
_OR_NONE: Final = ("layout", "recompute_tags", "recompute_layers")  # -1: not given
# Codes of combinations are 64-bit; a table of them may have so many entries a row.
_MOST_CODES: Final = 2**62
_TABLE_PER_ROW: Final = 8
# Axes that a plan writes as the same number.
_NUMBERS: Final = (
    "dp_replicate",
    "dp_shard",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "etp",
    "micro_batch_size",
    "zero_stage",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Plans by axis; every array has one entry a plan.

    Attributes:
        schedule, recompute, data_parallel, context_parallel: index into SCHEDULES, RECOMPUTES,
            DATA_PARALLELS, CONTEXTS.
        fp8_activations, the offloads, fused_loss, sequence_parallel: 0 or 1.
        layout: index into `layouts`, -1 where layers are spread evenly.
        recompute_tags: index into `tag_lists`, -1 where a plan gives none.
        recompute_layers: -1 where a plan gives none.
        layouts: layers of each chunk, the plans' `layers_per_stage`.
        tag_lists: the plans' `recompute_tags`.
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
    etp: Ints
    sequence_parallel: Ints
    context_parallel: Ints
    recompute_tags: Ints
    recompute_layers: Ints
    gradient_offload: Ints
    parameter_offload: Ints
    fused_loss: Ints
    layouts: tuple[tuple[int, ...], ...] = ()
    tag_lists: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def build(
        cls,
        layouts: Sequence[tuple[int, ...]] = (),
        tag_lists: Sequence[tuple[str, ...]] = (),
        **axes: ArrayLike,
    ) -> Candidates:
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
        _check(arrays, {"layout": len(layouts), "recompute_tags": len(tag_lists)})
        return cls(**arrays, layouts=tuple(layouts), tag_lists=tuple(tag_lists))

    @classmethod
    def from_plans(cls, plans: Iterable[ParallelPlan]) -> Candidates:
        """Returns the plans as candidates, in order."""
        plans = tuple(plans)
        layouts = tuple(dict.fromkeys(p.layers_per_stage for p in plans if p.layers_per_stage))
        tags = tuple(dict.fromkeys(p.recompute_tags for p in plans if p.recompute_tags))
        columns: dict[str, list[int]] = {n: [] for n in axis_names()}
        for plan in plans:
            for name in columns:
                columns[name].append(_code(plan, name, layouts, tags))
        return cls.build(layouts, tags, **columns)

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
        arrays = {n: getattr(self, n)[i] for n in axis_names()}
        return Candidates(**arrays, layouts=self.layouts, tag_lists=self.tag_lists)

    def part(self, start: int, stop: int) -> Candidates:
        """Returns the candidates from `start` to `stop` as views, nothing copied."""
        arrays = {n: getattr(self, n)[start:stop] for n in axis_names()}
        return Candidates(**arrays, layouts=self.layouts, tag_lists=self.tag_lists)

    def with_axes(self, **axes: Ints) -> Candidates:
        """Returns the candidates with other values on some axes (arrays of their length)."""
        arrays = {n: axes.get(n, getattr(self, n)) for n in axis_names()}
        return Candidates(**arrays, layouts=self.layouts, tag_lists=self.tag_lists)

    def plan(self, i: int) -> ParallelPlan:
        """Returns candidate `i` as a plan."""
        values: dict[str, Any] = {n: int(getattr(self, n)[i]) for n in _NUMBERS}
        values |= {n: bool(getattr(self, n)[i]) for n in _FLAGS}
        values |= {n: names[int(getattr(self, n)[i])] for n, names in _CHOICES.items()}
        layout, tags = int(self.layout[i]), int(self.recompute_tags[i])
        layers = int(self.recompute_layers[i])
        values["layers_per_stage"] = None if layout < 0 else self.layouts[layout]
        values["recompute_tags"] = () if tags < 0 else self.tag_lists[tags]
        values["recompute_layers"] = None if layers < 0 else layers
        return ParallelPlan(**values)


def distinct(*columns: Ints) -> tuple[Ints, Ints]:
    """Returns (where each distinct combination first stands, which one each row has).

    Combinations are in the order of their values, the first column's foremost.
    """
    code, size = _codes(columns)
    if size > _TABLE_PER_ROW * len(code):
        _, first, index = np.unique(code, return_index=True, return_inverse=True)
        return first.astype(np.int64), index.reshape(-1).astype(np.int64)
    # A table of all codes finds the distinct ones without sorting rows.
    seen = np.zeros(size, bool)
    seen[code] = True
    index = (np.cumsum(seen) - 1)[code]
    first = np.empty(np.count_nonzero(seen), np.int64)
    first[index[::-1]] = np.arange(len(code))[::-1]  # the last to be written is the first row
    return first, index.astype(np.int64)


def _codes(columns: tuple[Ints, ...]) -> tuple[Ints, int]:
    """Returns one number a row for its combination, in their order, and a bound above all."""
    code, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns if len(code) else ():
        low = int(column.min())
        span = int(column.max()) - low + 1
        if size * span > _MOST_CODES:
            values, place = np.unique(column, return_inverse=True)
            column, low, span = place.reshape(-1), 0, len(values)
            codes, place = np.unique(code, return_inverse=True)
            code, size = place.reshape(-1), len(codes)
        code = code * span + (column - low)
        size *= span
    return code, size


def axis_names() -> tuple[str, ...]:
    """Returns the names of the array fields of Candidates."""
    return tuple(f.name for f in fields(Candidates) if f.name not in {"layouts", "tag_lists"})


def _code(
    plan: ParallelPlan,
    name: str,
    layouts: tuple[tuple[int, ...], ...],
    tags: tuple[tuple[str, ...], ...],
) -> int:
    if name in _CHOICES:
        return _CHOICES[name].index(getattr(plan, name))
    if name == "layout":
        return layouts.index(plan.layers_per_stage) if plan.layers_per_stage else -1
    if name == "recompute_tags":
        return tags.index(plan.recompute_tags) if plan.recompute_tags else -1
    if name == "recompute_layers":
        return -1 if plan.recompute_layers is None else plan.recompute_layers
    return int(getattr(plan, name))


def _check(arrays: dict[str, Ints], lists: dict[str, int]) -> None:
    highest = {
        "zero_stage": 3,
        **{name: len(names) - 1 for name, names in _CHOICES.items()},
        **{name: count - 1 for name, count in lists.items()},
        **dict.fromkeys(_FLAGS, 1),
    }
    broken = []
    for name, values in arrays.items():
        low = -1 if name in _OR_NONE else 0 if name in _ZERO_BASED else 1
        high = highest.get(name)
        bad = (values < low) | ((values > high) if high is not None else False)
        if bad.any():
            limit = f"{low} to {high}" if high is not None else f"at least {low}"
            broken.append(
                Violation(field=name, value=str(values[bad][0]), rule="out of range", limit=limit)
            )
    if broken:
        raise InputError(broken)
