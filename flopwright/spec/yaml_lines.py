"""Strict YAML: plain data with the line of every key; no aliases, no duplicates, no tags."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from flopwright.errors import InputError, Violation

MAX_FILE_BYTES: Final = 1_000_000
MAX_DEPTH: Final = 32
MAX_BRACKETS: Final = 64
KeyPath = tuple[str | int, ...]
# YAML 1.1 reads 2:08 as 128 (base 60) and 010 as 8 (octal).
_BASE_60: Final = re.compile(r"[-+]?[\d_]+(:[\d_]+)+(\.[\d_]*)?")
_OCTAL: Final = re.compile(r"[-+]?0[\d_]+")
_NUMBER_TAGS: Final = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


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
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            # A pipe would wait for its writer, a device might never end.
            raise InputError(
                Violation(file=str(path), rule="not a regular file", nearest_fix="name a file")
            )
        size = found.st_size
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


def _check_brackets(text: str, file: str) -> None:
    """Refuses deep flow collections: the scanner's time grows with the square of open brackets."""
    depth = 0
    for mark in re.finditer(r"[\[{\]}]", text):
        depth += 1 if mark.group() in "[{" else -1
        if depth > MAX_BRACKETS:
            line = text.count("\n", 0, mark.start()) + 1
            raise InputError(
                Violation(
                    file=file,
                    line=line,
                    rule="nested too deeply",
                    limit=f"{MAX_BRACKETS} brackets",
                )
            )


def parse_yaml(text: str, file: str) -> Document:
    """Returns parsed YAML text with the lines of its keys; see `read_yaml`."""
    _check_brackets(text, file)
    try:
        # Aliases and tags are looked for as tokens, before anything is expanded.
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            tag = getattr(event, "tag", None)
            if tag is not None:
                raise InputError(
                    Violation(
                        file=file,
                        line=event.start_mark.line + 1 if event.start_mark else 0,
                        rule=f"YAML tags are not allowed ({_shown_tag(tag)})",
                        nearest_fix="write the plain value",
                    )
                )
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


def _shown_tag(tag: str) -> str:
    """Returns a tag as it is usually written: '!!set', '!mine'."""
    return tag.replace("tag:yaml.org,2002:", "!!")


def _misread(node: yaml.Node) -> str:
    """Returns what is wrong with a plain number that YAML 1.1 reads in another base, or ""."""
    if node.tag not in _NUMBER_TAGS:
        return ""
    if _BASE_60.fullmatch(node.value):
        return "YAML reads digits with colons in base 60"
    return (
        "YAML reads a number with a leading zero in base 8" if _OCTAL.fullmatch(node.value) else ""
    )


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
    return _scalar(node, path, problems, file)


def _scalar(node: yaml.Node, path: KeyPath, problems: list[Violation], file: str) -> Any:
    line, field = node.start_mark.line + 1, ".".join(map(str, path))
    misread = _misread(node)
    if misread:
        problems.append(
            Violation(
                file=file,
                line=line,
                field=field,
                value=node.value,
                rule=misread,
                nearest_fix="write a plain decimal number, or quote the text",
            )
        )
        return None
    loader = yaml.SafeLoader("")
    try:
        value = loader.construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        problems.append(
            Violation(
                file=file,
                line=line,
                field=field,
                rule=f"cannot be read: {error}",
            )
        )
        return None
    finally:
        loader.dispose()
    # Dates are a YAML surprise ("2026-01-01" without quotes): keep the text.
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(node.value)
