"""The arrays behind one pointer: compiled functions are handed a word, not two hundred."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.experimental import structref

from flopwright.simulator.rollouts.compiled.columns import Arrays


@structref.register
class _HandleType(types.StructRef):  # type: ignore[misc]
    """The type of a handle in compiled code."""


class Handle(structref.StructRefProxy):  # type: ignore[misc]
    """`Arrays` as compiled code takes them; the arrays themselves are shared, not copied."""

    def __new__(cls, arrays: Arrays) -> Any:
        """Returns the handle of these arrays."""
        return structref.StructRefProxy.__new__(cls, *arrays)


structref.define_proxy(Handle, _HandleType, list(Arrays._fields))
