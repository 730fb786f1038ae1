"""Which tensors hold one weight in each release format, and which weights that is. No torch.

A weight `x.weight` of a release becomes several tensors: its numbers, and scales beside them.
Which roles a format covers stands in `flopwright.spec.formats`, with its bits and blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from flopwright.models.hf.header import DTYPE_BITS
from flopwright.spec.formats import BLOCK_FP8, INT4_G32, MXFP4, WeightFormat
from flopwright.spec.parameters import Role

LayoutName = Literal["block_fp8", "int4_g32", "mxfp4", "mxfp4_blocks"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors that hold a weight.

    Attributes:
        ending: of its name, after the weight's own without the layout's `ending`.
        dtypes: by safetensors' names; the first is written, all are read.
        shape: returns its shape from the weight's.
        rows: rows of the weight in one of its rows; 0 for a tensor that describes the whole.
        inner: dimensions of what one of its rows is.
    """

    ending: str
    dtypes: tuple[str, ...]
    shape: Callable[[Shape], Shape]
    rows: int = 1
    inner: int = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """How a release format stores one weight [..., rows, columns].

    Attributes:
        ending: what a weight's name has in place of the parts' endings.
        parts: numbers first.
        whole_columns: columns must be a multiple of this.
        stacked: weights are stacks of matrices, transposed where they are not quantised
            (gpt-oss).
    """

    name: LayoutName
    format: WeightFormat
    ending: str
    parts: tuple[Part, ...]
    whole_columns: int = 1
    stacked: bool = False

    @property
    def row_block(self) -> int:
        """Rows that share a scale."""
        return self.format.block[0]

    def weight_shape(self, numbers: Shape) -> Shape:
        """Returns the shape of the weight whose numbers' tensor has this one."""
        if self.name == "mxfp4_blocks":
            return (*numbers[:-2], numbers[-2] * numbers[-1] * 2)
        a_number = {"block_fp8": 1, "int4_g32": 8, "mxfp4": 2}[self.name]
        return (*numbers[:-1], numbers[-1] * a_number)

    def nbytes(self, shape: Shape) -> int:
        """Returns the bytes of all parts of a weight."""
        bits = (DTYPE_BITS[p.dtypes[0]] * math.prod(p.shape(shape)) for p in self.parts)
        return sum(bits) // 8


def _columns(by: int) -> Callable[[Shape], Shape]:
    return lambda shape: (*shape[:-1], -(-shape[-1] // by))


def _tiles(shape: Shape) -> Shape:
    rows, columns = BLOCK_FP8.block
    return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))


LAYOUTS: Final[dict[LayoutName, Layout]] = {
    layout.name: layout
    for layout in (
        Layout(
            "block_fp8", BLOCK_FP8, ".weight",
            (
                Part(".weight", ("F8_E4M3",), lambda shape: shape),
                Part(".weight_scale_inv", ("F32", "BF16"), _tiles, BLOCK_FP8.block[0]),
            ),
        ),
        Layout(
            "int4_g32", INT4_G32, ".weight",
            (
                Part(".weight_packed", ("I32",), _columns(8)),
                Part(".weight_scale", ("BF16", "F16", "F32"), _columns(INT4_G32.block[1])),
                Part(".weight_shape", ("I64", "I32"), lambda shape: (len(shape),), 0),
            ),
            whole_columns=INT4_G32.block[1],
        ),
        Layout(
            "mxfp4", MXFP4, ".weight",
            (
                Part(".weight_packed", ("U8",), _columns(2)),
                Part(".weight_scale", ("U8", "F8_E8M0"), _columns(MXFP4.block[1])),
            ),
            whole_columns=MXFP4.block[1],
        ),
        Layout(
            "mxfp4_blocks", MXFP4, "",
            (
                Part("_blocks", ("U8",), lambda s: (*s[:-1], s[-1] // 32, 16), inner=2),
                Part("_scales", ("U8", "F8_E8M0"), _columns(MXFP4.block[1])),
            ),
            whole_columns=MXFP4.block[1],
            stacked=True,
        ),
    )
}  # fmt: skip

# Names of a language model's matrices, in the layouts of all families that have such releases.
_LAYER: Final = re.compile(r"^(?:language_model\.|model\.)*layers\.\d+\.(.+)$")
_ROLES: Final[tuple[tuple[re.Pattern[str], Role], ...]] = (
    (re.compile(r"\bexperts\.(?:\d+\.)?\w+$"), "expert"),
    (re.compile(r"\bshared_experts?\."), "shared_expert"),
    (re.compile(r"\brouted_expert_(?:down|up)_proj$"), "latent"),
    (re.compile(r"^(?:mlp|block_sparse_moe)\.(?:gate|router)$"), "router"),
    (re.compile(r"^self_attn\.\w+$"), "attention"),
    (re.compile(r"^mlp\.\w+_proj$"), "mlp"),
)


def role_of(name: str, shape: Shape) -> Role | None:
    """Returns the role of a released matrix by its name; None of anything else."""
    found = _LAYER.match(name)
    if found is None:
        return None
    inner = found[1]
    stack = re.search(r"\bexperts\.(?:gate_up|down)_proj$", inner) is not None
    if not inner.endswith(".weight") and not stack:
        return None
    if len(shape) != (3 if stack else 2):
        return None
    inner = inner.removesuffix(".weight")
    return next((role for pattern, role in _ROLES if pattern.search(inner)), None)


def layout_for(layout: Layout | None, name: str, shape: Shape) -> Layout | None:
    """Returns the layout if a release in it quantises this tensor, else None."""
    if layout is None or role_of(name, shape) not in layout.format.roles:
        return None
    if layout.stacked != (len(shape) == 3):
        return None
    # One row: queries of residual mixtures and the like are vectors, not matrices.
    return layout if min(shape) > 1 else None
