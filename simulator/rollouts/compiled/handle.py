"""The arrays behind one number: compiled functions are handed a word, not two hundred.

Numba counts references to arrays wherever it touches one. These are borrowed: the caller
holds the arrays while the loop runs, and the handle knows only where their numbers are. So
the handle is the address of a table of addresses and shapes, which no loop changes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_getattr_generic,
    register_model,
)
from numba.np.arrayobj import populate_array

from flopwright.simulator.rollouts.compiled.columns import Arrays, Ints

_COLUMNS: Final = 3  # address, rows, columns
_FLAT: Final = frozenset(
    ("roots", "counts", "sums", "rules", "rates", "load_s", "turn_s", "dealt", "servers",
     "judges", "tree", "finish_s", "finish_row", "log_s"),
)  # fmt: skip
_REAL: Final = frozenset(
    ("times", "floats", "sums", "rates", "tables", "load_s", "turn_s", "servers", "judges",
     "finish_s", "log_s"),
)  # fmt: skip
_TYPES: Final = {
    name: types.Array(
        types.float64 if name in _REAL else types.int64, 1 if name in _FLAT else 2, "C"
    )
    for name in Arrays._fields
}


class _HandleType(types.Type):  # type: ignore[misc]
    """The type of a handle in compiled code: the address of the table."""

    def __init__(self) -> None:
        super().__init__(name="RolloutArrays")


HANDLE: Final = _HandleType()


@register_model(_HandleType)
class _HandleModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.IntType(64))


@infer_getattr
class _HandleAttributes(AttributeTemplate):  # type: ignore[misc]
    key = _HandleType

    def generic_resolve(self, _kind: Any, name: str) -> Any:
        return _TYPES.get(name)


@lower_getattr_generic(_HandleType)  # type: ignore[untyped-decorator]
def _attribute(context: Any, builder: Any, _kind: Any, value: Any, name: str) -> Any:
    """Builds the array of a name from its line in the table, which never changes."""
    word, kind = ir.IntType(64), _TYPES[name]
    table = builder.inttoptr(value, word.as_pointer())
    first = Arrays._fields.index(name) * _COLUMNS

    def entry(column: int) -> Any:
        place = builder.gep(table, [ir.Constant(word, first + column)])
        loaded = builder.load(place)
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return loaded

    size = ir.Constant(word, 8)
    shape = [entry(1 + axis) for axis in range(kind.ndim)]
    strides = [size] if kind.ndim == 1 else [builder.mul(shape[1], size), size]
    array = context.make_array(kind)(context, builder)
    populate_array(
        array,
        data=builder.inttoptr(entry(0), array.data.type),
        shape=cgutils.pack_array(builder, shape),
        strides=cgutils.pack_array(builder, strides),
        itemsize=size,
        meminfo=None,
    )
    return array._getvalue()


@intrinsic  # type: ignore[untyped-decorator]
def bind(_typing: Any, _address: Any) -> Any:
    """Makes a handle of the address of a table."""

    def code(_context: Any, _builder: Any, _signature: Any, arguments: Any) -> Any:
        return arguments[0]

    return HANDLE(types.int64), code


def places(arrays: Arrays) -> Ints:
    """Returns (address, rows, columns) of each array; they must outlive whoever uses it."""
    at = np.zeros((len(arrays), _COLUMNS), dtype=np.int64)
    for i, (name, array) in enumerate(zip(Arrays._fields, arrays, strict=True)):
        assert array.flags.c_contiguous, name
        assert array.ndim == _TYPES[name].ndim, name
        assert array.dtype == (np.float64 if name in _REAL else np.int64), name
        at[i, 0] = array.ctypes.data
        at[i, 1 : 1 + array.ndim] = array.shape
    return at
