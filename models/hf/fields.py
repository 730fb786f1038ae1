"""Reading a foreign config: every field is read, expected, known to be harmless, or refused."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from flopwright.errors import InputError, Violation

MAX_CONFIG_BYTES: Final = 1_000_000
_MISSING: Final = object()


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        InputError: missing, unreadable, too large, no JSON, or no object at its top.
    """
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InputError(
                Violation(
                    file=str(path),
                    rule="the file is too large for a config",
                    limit=f"{MAX_CONFIG_BYTES} bytes",
                )
            )
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(
            Violation(file=str(path), rule=f"cannot read the file: {error.strerror}")
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(Violation(file=str(path), rule=f"not valid JSON: {error}")) from error
    if not isinstance(data, dict):
        raise InputError(
            Violation(file=str(path), rule="expected a JSON object", value=type(data).__name__)
        )
    return data


class Fields:
    """One JSON object of a config, and which of its fields are accounted for.

    Readers never raise: they note a violation and hand back a stand-in, so that `finish`
    reports everything at once. A null counts as absent, as it does in transformers.

    Attributes:
        notes: what the model record leaves out, in words.
    """

    def __init__(self, data: Mapping[str, Any], file: str = "", prefix: str = "") -> None:
        self._data, self._file, self._prefix = data, file, prefix
        self._known: set[str] = set()
        self._violations: list[Violation] = []
        self.notes: list[str] = []

    def refuse(self, name: str, rule: str, fix: str = "") -> None:
        """Notes a violation of the field, with its value."""
        value = self._data.get(name, _MISSING)
        self._violations.append(
            Violation(
                file=self._file,
                field=self._prefix + name,
                value="" if value is _MISSING else _short(value),
                rule=rule,
                nearest_fix=fix,
            )
        )

    def has(self, name: str) -> bool:
        """Returns whether the field is there and not null."""
        return self._data.get(name) is not None

    def raw(self, name: str) -> Any:
        """Returns the field as it stands, None where absent."""
        self._known.add(name)
        return self._data.get(name)

    def _typed(self, name: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
        value = self.raw(name)
        if value is None:
            if default is _MISSING:
                self.refuse(name, "a required field is missing")
                return kinds[0](1)
            return default
        if type(value) not in kinds:
            self.refuse(name, f"must be {what}")
            return kinds[0](1)
        return value

    def integer(self, name: str, default: Any = _MISSING) -> int:
        """Returns a positive integer field."""
        value: int = self._typed(name, (int,), "an integer", default)
        if value is not None and value < 1 and value != default:
            self.refuse(name, "must be positive")
            return 1
        return value

    def count(self, name: str, default: Any = _MISSING) -> int:
        """Returns an integer field that may be 0."""
        value: int = self._typed(name, (int,), "an integer", default)
        if value < 0:
            self.refuse(name, "must not be negative")
            return 0
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        """Returns a positive number field."""
        value = float(self._typed(name, (float, int), "a number", default))
        if not 0 < value < float("inf"):
            self.refuse(name, "must be positive and finite")
            return 1.0
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns a true/false field."""
        return bool(self._typed(name, (bool,), "true or false", default))

    def only(self, name: str, *allowed: Any, why: str) -> None:
        """Refuses the field unless it is absent, null or one of `allowed`."""
        value = self.raw(name)
        known = any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)
        if value is not None and not known:
            choices = " or ".join(json.dumps(a) for a in allowed)
            self.refuse(name, why, f"only {choices} can be represented")

    def harmless(self, names: Iterable[str]) -> None:
        """Accepts fields that change neither the shape nor the function of the model."""
        self._known.update(names)

    def section(self, name: str) -> Fields | None:
        """Returns a nested object, None where absent; its violations join these."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, "must be an object")
            return None
        inner = Fields(value, self._file, f"{self._prefix}{name}.")
        inner._violations, inner.notes = self._violations, self.notes
        return inner

    def close(self) -> None:
        """Notes every field that nobody accounted for."""
        for name in self._data:
            if name not in self._known:
                # Only a likely slip of the pen is worth a hint: most unknown fields are real
                # fields of some other architecture.
                close = difflib.get_close_matches(name, sorted(self._known), n=1, cutoff=0.85)
                hint = f"did you mean '{close[0]}'?" if close else ""
                self.refuse(name, "unknown field: what it does to the model is not known", hint)

    def finish(self) -> None:
        """Closes the object.

        Raises:
            InputError: every violation noted.
        """
        self.close()
        if self._violations:
            raise InputError(self._violations)


def _short(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."
