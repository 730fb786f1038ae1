"""A folder of files written whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from flopwright.errors import InputError, Violation


def write_folder(
    to: Path, files: Mapping[str, bytes], *, executable: Collection[str] = (), force: bool = False
) -> None:
    """Writes `files` into the folder `to`: staged first, then renamed into place.

    A folder that does not exist appears as a whole. One that exists (empty, or with
    `force`) gets each file by a rename; what else it holds, such as a run's results, stays.

    Raises:
        InputError: `to` is a file or a link, holds something (without `force`), or cannot
            be written.
    """
    _refuse(to, force=force)
    exists = to.is_dir()
    home = to if exists else to.parent
    staged: Path | None = None
    try:
        home.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".export-", dir=home))
        for name, content in files.items():
            path = staged / name
            path.write_bytes(content)
            path.chmod(0o755 if name in executable else 0o644)
        if exists:
            for name in files:
                (staged / name).replace(to / name)
        else:
            staged.chmod(0o755)
            staged.rename(to)
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise InputError(Violation(file=str(to), rule=rule)) from error
    finally:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)


def _refuse(to: Path, *, force: bool) -> None:
    if to.is_symlink():
        raise InputError(Violation(file=str(to), rule="is a link", nearest_fix="name the folder"))
    if to.exists() and not to.is_dir():
        rule = "exists and is not a folder"
        raise InputError(Violation(file=str(to), rule=rule, nearest_fix="name another folder"))
    if to.is_dir() and not force and any(to.iterdir()):
        raise InputError(
            Violation(
                file=str(to),
                rule="the folder is not empty",
                nearest_fix="name another folder, or write over the bundle in it with --force",
            )
        )
