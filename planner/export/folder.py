"""A folder of files written whole or not at all."""

from __future__ import annotations

import secrets
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
    Modes are those of the umask.

    Raises:
        InputError: see `check_folder`; or the files cannot be written.
    """
    check_folder(to, files, force=force)
    exists = to.is_dir()
    home = to if exists else to.parent
    staged: Path | None = None
    try:
        home.mkdir(parents=True, exist_ok=True)
        # Not tempfile.mkdtemp: its folders are readable by their owner alone.
        staged = home / f".export-{secrets.token_hex(4)}"
        staged.mkdir()
        for name, content in files.items():
            path = staged / name
            path.write_bytes(content)
            if name in executable:
                mode = path.stat().st_mode
                path.chmod(mode | (mode & 0o444) >> 2)  # who may read it may run it
        if exists:
            for name in files:
                (staged / name).replace(to / name)
        else:
            staged.rename(to)
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise InputError(Violation(file=str(to), rule=rule)) from error
    finally:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)


def check_folder(to: Path, names: Collection[str], *, force: bool = False) -> None:
    """Refuses a folder that `names` cannot be written into, before work is done for them.

    Raises:
        InputError: `to` is a file or a link, holds something (without `force`), holds a
            folder where a file is to stand, or nothing can be written there.
    """
    check_place(to)
    found: Violation | None = None
    if to.is_symlink():
        found = Violation(file=str(to), rule="is a link", nearest_fix="name the folder")
    elif to.exists() and not to.is_dir():
        rule = "exists and is not a folder"
        found = Violation(file=str(to), rule=rule, nearest_fix="name another folder")
    elif to.is_dir() and not force and any(to.iterdir()):
        found = Violation(
            file=str(to),
            rule="the folder is not empty",
            nearest_fix="name another folder, or write over the bundle in it with --force",
        )
    if found is not None:
        raise InputError(found)
    folders = [to / name for name in names if (to / name).is_dir()]
    if folders:
        fix = "move it away, or name another folder"
        rule = "is a folder, and a file of this name is to be written"
        raise InputError([Violation(file=str(p), rule=rule, nearest_fix=fix) for p in folders])


def check_place(path: Path) -> None:
    """Refuses a path where nothing can be written; asked before work is done for it.

    Raises:
        InputError: the nearest folder above it that exists takes no file.
    """
    try:
        start = path.absolute().parent if path.is_file() else path.absolute()
        home = next(p for p in (start, *start.parents) if p.exists())
        # Permissions alone do not tell: a file system may be read-only or full.
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise InputError(Violation(file=str(path), rule=rule)) from error
