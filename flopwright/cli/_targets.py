"""Files that a verb will write, checked before it does the work that they are for."""

from __future__ import annotations

from pathlib import Path

from flopwright.errors import InputError, Violation


def check_file(flag: str, path: Path | None, suffix: str, what: str) -> None:
    """Refuses a file that cannot be written or whose name says that it is something else.

    Args:
        flag: the option that names it, such as "--png".
        path: None where the option was not given.
        suffix: how the name must end, such as ".png".
        what: what it is, in words ("the picture is a PNG").

    Raises:
        InputError: another suffix, a folder, or a place where nothing can be written.
    """
    from flopwright.planner.export.folder import check_place

    if path is None:
        return
    if path.suffix != suffix:
        fix = f"write {path.with_suffix(suffix)}" if path.name else ""
        raise InputError(Violation(field=flag, value=str(path), rule=what, nearest_fix=fix))
    try:
        check_place(path)
    except InputError as error:
        rules = ", ".join(v.rule for v in error.violations)
        raise InputError(Violation(field=flag, value=str(path), rule=rules)) from error
    if path.is_dir():
        raise InputError(
            Violation(
                field=flag,
                value=str(path),
                rule="is a folder",
                nearest_fix=f"write {path / ('picture' + suffix)}",
            )
        )
