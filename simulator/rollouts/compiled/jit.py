"""How the compiled loop is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import config, njit

from flopwright.simulator.rollouts.compiled.folder import code_folder

F = TypeVar("F", bound=Callable[..., Any])


def native(function: F) -> F:
    """Returns the function compiled when it is first used; divisions as NumPy has them."""
    return cast("F", njit(error_model="numpy")(function))


def compiled_once(function: F) -> F:
    """Returns the function compiled, its machine code kept where that can be written."""
    before = config.CACHE_DIR
    try:
        folder = code_folder()
        folder.mkdir(parents=True, exist_ok=True)
        config.CACHE_DIR = str(folder)
        return cast("F", njit(error_model="numpy", cache=True)(function))
    except (OSError, RuntimeError):  # nowhere to write: compiled anew in every process
        return native(function)
    finally:
        config.CACHE_DIR = before
