"""A checkpoint folder's weight files: index, headers and sums, checked. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.models.hf.fields import MAX_CONFIG_BYTES, read_json
from flopwright.models.hf.header import Header, read_header

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
CRC_KEY: Final = "crc32"
MAX_INDEX_BYTES: Final = 500_000_000  # a trillion parameters take 70,000 names, 7 MB
_SHOWN: Final = 20


def problem(path: Path, tensor: str, rule: str, value: str = "", limit: str = "") -> Violation:
    """Returns what is wrong with a tensor of a file."""
    return Violation(file=str(path), field=tensor, rule=rule, value=value, limit=limit)


def raise_all(problems: list[Violation]) -> None:
    """Raises all problems (the first 20 of them in words).

    Raises:
        InputError: there are any.
    """
    if len(problems) > _SHOWN:
        more = Violation(rule=f"and {len(problems) - _SHOWN} more like these")
        problems = [*problems[:_SHOWN], more]
    if problems:
        raise InputError(problems)


def read_headers(folder: Path) -> tuple[dict[Path, Header], dict[str, Path]]:
    """Returns every weight file's header, and the index: the file of each tensor.

    Raises:
        InputError: a missing, corrupt or truncated file, or an index that is not theirs.
    """
    index_file = folder / INDEX_FILE
    if not index_file.is_file():
        if not (folder / SINGLE_FILE).is_file():
            rule = f"holds neither {INDEX_FILE} nor {SINGLE_FILE}"
            raise InputError(Violation(file=str(folder), rule=rule))
        return {folder / SINGLE_FILE: read_header(folder / SINGLE_FILE)}, {}
    index = _read_index(index_file)
    headers = {path: read_header(path) for path in dict.fromkeys(index.values())}
    absent = [
        problem(path, name, "the index says the tensor is in this file, but it is not")
        for name, path in index.items()
        if name not in headers[path].tensors
    ]
    unlisted = [
        problem(path, name, "the tensor is not in the index")
        for path, header in headers.items()
        for name in header.tensors
        if index.get(name) != path
    ]
    raise_all(absent + unlisted)
    return headers, index


def _read_index(path: Path) -> dict[str, Path]:
    size = path.stat().st_size
    if size <= MAX_CONFIG_BYTES:
        data: Any = read_json(path)
    elif size <= MAX_INDEX_BYTES:
        try:
            data = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise InputError(problem(path, "", f"not valid JSON: {error}")) from error
    else:
        raise InputError(problem(path, "", "too large", f"{size}", f"{MAX_INDEX_BYTES} bytes"))
    entries = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise InputError(problem(path, "weight_map", "must map tensors to files"))
    for name, file in entries.items():
        plain = isinstance(file, str) and Path(file).name == file and file not in {".", ".."}
        if not plain or not file.endswith(".safetensors"):
            rule = "must name a .safetensors file in the same folder"
            raise InputError(problem(path, f"weight_map.{name}", rule, repr(file)))
    return {name: path.parent / file for name, file in entries.items()}


def crc32s(path: Path, header: Header) -> dict[str, int]:
    """Returns the sums our own files carry; files of others have none.

    Raises:
        InputError: they are broken.
    """
    text = header.metadata.get(CRC_KEY)
    if text is None:
        return {}
    try:
        sums = json.loads(text)
    except ValueError as error:
        raise InputError(problem(path, CRC_KEY, "broken metadata")) from error
    if not isinstance(sums, dict) or not all(type(v) is int for v in sums.values()):
        raise InputError(problem(path, CRC_KEY, "broken metadata"))
    return sums
