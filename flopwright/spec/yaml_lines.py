"""Strict YAML: plain data with the line of every key; no aliases, no duplicates, no tags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from flopwright.errors import InputError, Violation

MAX_FILE_BYTES: Final = 1_000_000
MAX_DEPTH: Final = 32
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """Parsed data and, for each key path, its 1-based line."""

    data: Any
    lines: dict[KeyPath, int]
    file: str

    def line_of(self, path: KeyPath) -> int:
        """Returns the line of the deepest known part of `path`."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return 0


def read_yaml(path: Path) -> Document:
    """Returns the parsed file.

    Raises:
        InputError: missing, unreadable or too large file, broken YAML, an alias, a
            duplicate key or a tag; each with its line.
    """
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InputError(
                Violation(
                    file=str(path),
                    rule="the file is too large",
                    value=f"{size} bytes",
                    limit=f"{MAX_FILE_BYTES} bytes",
                )
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        fix = _nearby(path) if isinstance(error, FileNotFoundError) else ""
        raise InputError(
            Violation(
                file=str(path), rule=f"cannot read the file: {error.strerror}", nearest_fix=fix
            )
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(Violation(file=str(path), rule="the file is not UTF-8 text")) from error
    return parse_yaml(text, str(path))


def _nearby(path: Path) -> str:
    from flopwright.errors import did_you_mean

    folder = path.parent
    names = (
        [p.name for p in folder.iterdir() if p.suffix == path.suffix] if folder.is_dir() else []
    )
    return did_you_mean(path.name, names) if names else ""


def parse_yaml(text: str, file: str) -> Document:
    """Returns parsed YAML text with the lines of its keys; see `read_yaml`."""
    try:
        # Aliases are looked for as tokens, before anything is expanded.
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise InputError(
                    Violation(
                        file=file,
                        line=event.start_mark.line + 1 if event.start_mark else 0,
                        rule="YAML aliases are not allowed",
                        nearest_fix="write the value out",
                    )
                )
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        raise InputError(
            Violation(
                file=file, line=mark.line + 1 if mark else 0, rule=f"not valid YAML: {problem}"
            )
        ) from error
    except RecursionError as error:
        raise InputError(
            Violation(file=file, rule="nested too deeply", limit=str(MAX_DEPTH))
        ) from error
    lines: dict[KeyPath, int] = {}
    problems: list[Violation] = []
    data = _construct(root, (), lines, problems, file) if root is not None else None
    if problems:
        raise InputError(problems)
    return Document(data=data, lines=lines, file=file)


def _construct(
    node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], problems: list[Violation], file: str
) -> Any:
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if len(path) > MAX_DEPTH:
        problems.append(
            Violation(file=file, line=line, rule="nested too deeply", limit=str(MAX_DEPTH))
        )
        return None
    if isinstance(node, yaml.MappingNode):
        out: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
            child = (*path, key)
            if key in out:
                problems.append(
                    Violation(
                        file=file,
                        line=key_node.start_mark.line + 1,
                        field=".".join(map(str, child)),
                        rule="the key stands twice",
                        nearest_fix="remove one",
                    )
                )
            lines[child] = key_node.start_mark.line + 1
            out[key] = _construct(value_node, child, lines, problems, file)
        return out
    if isinstance(node, yaml.SequenceNode):
        return [
            _construct(item, (*path, i), lines, problems, file)
            for i, item in enumerate(node.value)
        ]
    loader = yaml.SafeLoader("")
    try:
        value = loader.construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        problems.append(
            Violation(
                file=file,
                line=line,
                field=".".join(map(str, path)),
                rule=f"cannot be read: {error}",
            )
        )
        return None
    finally:
        loader.dispose()
    # Dates are a YAML surprise ("2026-01-01" without quotes): keep the text.
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(node.value)
