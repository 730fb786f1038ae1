"""How the compiled loop is compiled, and where its machine code is kept.

Numba keeps machine code by the file of the function alone; the loop takes in functions of
many files. So its folder carries a hash of all their sources: a changed line is compiled.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba import config, njit

from flopwright.plan import rollout_choices
from flopwright.simulator.rollouts import decode, state

F = TypeVar("F", bound=Callable[..., Any])


def native(function: F) -> F:
    """Returns the function compiled when it is first used; divisions as NumPy has them."""
    return cast("F", njit(error_model="numpy")(function))


def code_folder() -> Path:
    """Returns the folder for the machine code of the present sources."""
    home = os.environ.get("FLOPWRIGHT_HOME") or Path.home() / ".local" / "share" / "flopwright"
    here = sorted(Path(__file__).parent.glob("*.py"))
    sources = [*here, *(Path(m.__file__ or "") for m in (rollout_choices, decode, state))]
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sources:
        digest.update(source.read_bytes())
    return Path(home) / "compiled" / digest.hexdigest()[:16]


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
