"""What a conversion will write, tensor by tensor, before anything is read. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flopwright.errors import InputError, Violation
from flopwright.models.formats.layout import (
    LAYOUTS,
    Layout,
    LayoutName,
    Shape,
    layout_for,
    role_of,
)
from flopwright.models.formats.stored import StoredWeight
from flopwright.models.hf.files import problem, raise_all
from flopwright.models.hf.header import DTYPE_BITS

# What the command line calls a format; which of two layouts of MXFP4 the model decides.
TARGETS: Final[tuple[LayoutName | None, ...]] = (None, "block_fp8", "int4_g32", "mxfp4")
BF16: Final = "bf16"
TARGET_NAMES: Final = (BF16, *(name for name in TARGETS if name is not None))
_WIDE: Final = frozenset({"F64", "F32", "F16"})
# Weights, not the numbers that a release keeps wide (selection biases, decay rates).
_CAST: Final = re.compile(r"(\.weight|\.bias|\.experts\.(gate_up|down)_proj(_bias)?|\.sinks)$")


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that will be written."""

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Move:
    """One weight from the form it is stored in to another.

    Attributes:
        target: None for a plain tensor.
        outputs: by the endings of the target's layout; of a plain tensor by "".
        copied: its bytes go over as they are.
        turned: a stack of matrices that is transposed on the way (gpt-oss).
    """

    weight: StoredWeight
    target: Layout | None
    outputs: Mapping[str, Output]
    copied: bool
    turned: bool = False

    @property
    def matrix_shape(self) -> Shape:
        """Shape of the weight as the target has it."""
        shape = self.weight.shape
        return (*shape[:-2], shape[-1], shape[-2]) if self.turned else shape

    @property
    def nbytes(self) -> int:
        """Bytes that it writes."""
        return sum(out.nbytes for out in self.outputs.values())


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One output file: its name and the weights that go into it."""

    name: str
    moves: tuple[Move, ...]

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Its tensors; wide dtypes first, so that all of them are aligned."""
        outs = [out for move in self.moves for out in move.outputs.values()]
        return tuple(sorted(outs, key=lambda out: -DTYPE_BITS[out.dtype]))


def target_layout(name: str, model_type: str) -> Layout | None:
    """Returns the layout of a format by the command line's name for it, None for bf16.

    Raises:
        InputError: there is none of that name.
    """
    if name == BF16:
        return None
    if name not in TARGET_NAMES:
        rule, limit = "no such format is written", ", ".join(TARGET_NAMES)
        raise InputError(Violation(field="format", value=name, rule=rule, limit=limit))
    if name == "mxfp4" and model_type == "gpt_oss":
        return LAYOUTS["mxfp4_blocks"]
    return next(layout for layout in LAYOUTS.values() if layout.name == name)


def plan_moves(weights: Iterable[StoredWeight], target: Layout | None) -> list[Move]:
    """Returns how each weight goes into the target format.

    Raises:
        InputError: no weight is of the kind that the format covers, or a matrix does not fit it.
    """
    moves = [_move(weight, target) for weight in weights]
    if target is not None:
        problems = [
            problem(
                m.weight.file,
                m.weight.name,
                f"{target.name} needs whole blocks of columns",
                str(m.matrix_shape[-1]),
                f"a multiple of {target.whole_columns}",
            )
            for m in moves
            if m.target is target and m.matrix_shape[-1] % target.whole_columns
        ]
        raise_all(problems + _stacks(moves, target))
        if not any(m.target is target for m in moves):
            raise nothing_covered(target)
    return moves


def nothing_covered(target: Layout) -> InputError:
    """Returns the error of a model that has nothing which a format's releases quantise."""
    roles = ", ".join(sorted(target.format.roles))
    rule = f"no matrix here is of a kind that {target.name} releases quantise ({roles})"
    fix = "block_fp8, which takes the matrices of all blocks"
    return InputError(Violation(field="--to", value=target.name, rule=rule, nearest_fix=fix))


def _stacks(moves: list[Move], target: Layout) -> list[Violation]:
    """Returns a violation for stacked experts that the format has no layout for."""
    return [
        problem(m.weight.file, m.weight.name, f"stacked experts have no layout in {target.name}")
        for m in moves
        if m.target is None and role_of(m.weight.name, m.weight.shape) == "expert"
    ]


def _move(weight: StoredWeight, target: Layout | None) -> Move:
    chosen = layout_for(target, weight.name, weight.shape)
    source = weight.layout
    if chosen is not None and chosen is source:
        outputs = {e: Output(s.name, s.dtype, s.shape) for e, s in weight.parts.items()}
        return Move(weight, chosen, outputs, copied=True)
    stacked = chosen or source
    turned = stacked is not None and stacked.stacked
    shape = (*weight.shape[:-2], weight.shape[-1], weight.shape[-2]) if turned else weight.shape
    if chosen is None:
        span = next(iter(weight.parts.values()))
        narrow = source is not None or (span.dtype in _WIDE and _CAST.search(weight.name))
        out = Output(weight.name, "BF16" if narrow else span.dtype, shape)
        return Move(weight, None, {"": out}, copied=not narrow, turned=turned)
    base = weight.name.removesuffix(chosen.ending) if chosen.ending else weight.name
    outputs = {
        part.ending: Output(base + part.ending, part.dtypes[0], part.shape(shape))
        for part in chosen.parts
    }
    return Move(weight, chosen, outputs, copied=False, turned=turned)


def plan_shards(moves: Iterable[Move], max_bytes: int) -> tuple[ShardPlan, ...]:
    """Returns the output files, weights in order; one larger than a file gets its own."""
    groups: list[list[Move]] = []
    held = 0
    for move in moves:
        if not groups or (held and held + move.nbytes > max_bytes):
            groups.append([])
            held = 0
        groups[-1].append(move)
        held += move.nbytes
    count = len(groups)
    return tuple(
        ShardPlan(f"model-{i + 1:05d}-of-{count:05d}.safetensors", tuple(group))
        for i, group in enumerate(groups)
    )


def projections(named: Iterable[tuple[str, Shape]]) -> tuple[str, ...]:
    """Returns the modules of projection matrices among these tensors.

    For formats that name what they leave alone; tables, heads and routers go without saying.
    """
    matrices = (n for n, shape in named if len(shape) == 2 and n.endswith("_proj.weight"))
    return tuple(sorted(name.removesuffix(".weight") for name in matrices))


def kept_modules(moves: Iterable[Move]) -> tuple[str, ...]:
    """Returns the projections that stay as they are."""
    plain = (m.weight for m in moves if m.target is None)
    return projections((w.name, w.shape) for w in plain)


def free_bytes(folder: Path) -> int:
    """Returns the free bytes of the file system that a new folder would lie in."""
    import shutil

    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return shutil.disk_usage(there).free
