"""One exported file: its name, its text, and what of the plan it cannot say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFile:
    """A file for one launcher or framework.

    Attributes:
        omitted: what of the plan the target has no word for, each in words; they stand in
            the file's header too, so that nothing is dropped silently.
    """

    name: str
    text: str
    omitted: tuple[str, ...] = ()


def omission_lines(omitted: Iterable[str]) -> str:
    """Returns comment lines that name what the file does not say; "" for nothing."""
    lines = "".join(f"#   - {text}\n" for text in omitted)
    return f"# Not expressed here:\n{lines}" if lines else ""


def that_apply(claims: Iterable[tuple[bool, str]]) -> tuple[str, ...]:
    """Returns the texts of the claims that hold."""
    return tuple(text for applies, text in claims if applies)
