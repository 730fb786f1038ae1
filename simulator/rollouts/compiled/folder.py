"""Where the machine code of the compiled loop is kept, told without importing the compiler."""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flopwright.plan import rollout_choices
from flopwright.simulator.rollouts import decode, state


def code_folder() -> Path:
    """Returns the folder for the machine code of the present sources.

    Numba keeps machine code by the file of one function; the loop takes in functions of many
    files. So the folder's name is a hash of all of them: a changed line is compiled anew.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    here = sorted(Path(__file__).parent.glob("*.py"))
    sources = [*here, *(Path(m.__file__ or "") for m in (rollout_choices, decode, state))]
    try:
        digest = hashlib.sha256(version("numba").encode())
    except PackageNotFoundError:
        digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    return cache / "flopwright" / "compiled" / digest.hexdigest()[:16]


def is_compiled() -> bool:
    """Whether the loop was compiled on this machine before."""
    return any(code_folder().rglob("*.nbc"))
