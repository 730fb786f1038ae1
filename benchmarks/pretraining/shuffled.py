"""Characters in random order: what stands before one tells nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from flopwright.executor.data.text import load_text

CHARACTERS: Final = 1_000_000


def shuffled_text(path: Path, text: Path | None) -> Path:
    """Writes the first characters of a text in random order, if they are not there; their file.

    Args:
        text: default: the sources of Python's standard library.
    """
    if not path.is_file():
        characters = np.array(list("".join(load_text(text).documents)[:CHARACTERS]))
        np.random.default_rng(0).shuffle(characters)
        path.write_text("".join(characters), encoding="utf-8")
    return path
