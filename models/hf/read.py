"""Reading a released-layout checkpoint: everything is checked first, tensors stream out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flopwright.errors import InputError, Violation
from flopwright.models.hf.config import CONFIG_FILE, model_from_hf_config
from flopwright.models.hf.fields import MAX_CONFIG_BYTES, read_json
from flopwright.models.hf.header import WEIGHT_DTYPES, Header, read_header
from flopwright.models.hf.names import Stored, is_derived, stored_tensors
from flopwright.models.hf.write import CRC_KEY, INDEX_FILE, tensor_crc32
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import layer_parameters

SINGLE_FILE: Final = "model.safetensors"
MAX_INDEX_BYTES: Final = 500_000_000  # a trillion parameters take 70,000 names, 7 MB
_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stored tensor lies: the file, its name in there, its crc32 if one is recorded."""

    file: Path
    name: str
    crc32: int | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose files hold exactly the tensors of a model, by headers and sizes."""

    folder: Path
    spec: ModelSpec
    places: Mapping[str, Place]


def open_checkpoint(folder: Path, spec: ModelSpec | None = None) -> Checkpoint:
    """Returns a checkpoint after checking all of it but the tensors' values.

    Args:
        folder: config.json beside `model.safetensors`, or beside shards with their index.
        spec: the model it must hold; by default the one its config.json describes.

    Raises:
        InputError: a missing, corrupt or truncated file; a tensor that is missing, unexpected,
            of a wrong shape or of a dtype that is no weight; each with file and tensor.
    """
    config_file = folder / CONFIG_FILE
    if spec is None:
        spec = model_from_hf_config(config_file)
    extra = 0
    if config_file.is_file():
        extra = _extra_layers(read_json(config_file))
    headers, index = _headers(folder)
    places: dict[str, Place] = {}
    problems: list[Violation] = []
    expected = {s.name: s for s in stored_tensors(spec)}
    for path, header in headers.items():
        sums = _crc32s(path, header)
        for name, tensor in header.tensors.items():
            full = _full_name(name, spec)
            if full not in expected:
                if not _ignored(full, spec, extra):
                    problems.append(_unexpected(path, name))
                if full != "lm_head.weight":
                    continue
            elif tensor.shape != expected[full].shape:
                shapes = (str(list(tensor.shape)), str(list(expected[full].shape)))
                problems.append(_problem(path, name, "wrong shape", shapes[0], shapes[1]))
            if tensor.dtype not in WEIGHT_DTYPES:
                rule = "this dtype cannot be read as weights"
                problems.append(_problem(path, name, rule, tensor.dtype, ", ".join(WEIGHT_DTYPES)))
            if full in places:
                problems.append(_problem(path, name, f"also in {places[full].file.name}"))
            places[full] = Place(path, name, sums.get(name))
    for name in expected:
        if name not in places:
            where = index.get(name) or index.get(name.removeprefix("transformer."))
            problems.append(_problem(where or folder, name, "the tensor is missing"))
    _raise(problems)
    return Checkpoint(folder, spec, places)


def _problem(path: Path, tensor: str, rule: str, value: str = "", limit: str = "") -> Violation:
    return Violation(file=str(path), field=tensor, rule=rule, value=value, limit=limit)


def _unexpected(path: Path, name: str) -> Violation:
    fix = "dequantize the checkpoint first" if name.endswith(("_scale_inv", "_scale")) else ""
    rule = "unexpected tensor: the model has none of this name"
    return Violation(file=str(path), field=name, rule=rule, nearest_fix=fix)


def _raise(problems: list[Violation]) -> None:
    if len(problems) > _SHOWN:
        more = Violation(rule=f"and {len(problems) - _SHOWN} more like these")
        problems = [*problems[:_SHOWN], more]
    if problems:
        raise InputError(problems)


def _extra_layers(config: dict[str, Any]) -> int:
    """Returns how many multi-token prediction layers follow the model's own."""
    counts = [config.get(n) for n in ("num_nextn_predict_layers", "num_mtp_layers")]
    return max((c for c in counts if type(c) is int), default=0)


def _ignored(name: str, spec: ModelSpec, extra_layers: int) -> bool:
    """Returns whether a tensor that the model lacks is known to be no loss."""
    if is_derived(name) or (name == "lm_head.weight" and spec.tied_embeddings):
        return True
    first = spec.num_layers
    return any(name.startswith(f"model.layers.{first + i}.") for i in range(extra_layers))


def _full_name(name: str, spec: ModelSpec) -> str:
    """Returns GPT-2 names with the prefix that its first release left out."""
    bare = spec.family == "gpt2" and name.split(".")[0] in {"h", "wte", "wpe", "ln_f"}
    return f"transformer.{name}" if bare else name


def _headers(folder: Path) -> tuple[dict[Path, Header], dict[str, Path]]:
    """Returns every weight file's header, and the index: the file of each tensor."""
    index_file = folder / INDEX_FILE
    if not index_file.is_file():
        if not (folder / SINGLE_FILE).is_file():
            rule = f"holds neither {INDEX_FILE} nor {SINGLE_FILE}"
            raise InputError(Violation(file=str(folder), rule=rule))
        return {folder / SINGLE_FILE: read_header(folder / SINGLE_FILE)}, {}
    index = _read_index(index_file)
    headers = {path: read_header(path) for path in dict.fromkeys(index.values())}
    absent = [
        _problem(path, name, "the index says the tensor is in this file, but it is not")
        for name, path in index.items()
        if name not in headers[path].tensors
    ]
    unlisted = [
        _problem(path, name, "the tensor is not in the index")
        for path, header in headers.items()
        for name in header.tensors
        if index.get(name) != path
    ]
    _raise(absent + unlisted)
    return headers, index


def _read_index(path: Path) -> dict[str, Path]:
    size = path.stat().st_size
    if size <= MAX_CONFIG_BYTES:
        data: Any = read_json(path)
    elif size <= MAX_INDEX_BYTES:
        try:
            data = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise InputError(_problem(path, "", f"not valid JSON: {error}")) from error
    else:
        raise InputError(_problem(path, "", "too large", f"{size}", f"{MAX_INDEX_BYTES} bytes"))
    entries = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise InputError(_problem(path, "weight_map", "must map tensors to files"))
    for name, file in entries.items():
        plain = isinstance(file, str) and Path(file).name == file and file not in {".", ".."}
        if not plain or not file.endswith(".safetensors"):
            rule = "must name a .safetensors file in the same folder"
            raise InputError(_problem(path, f"weight_map.{name}", rule, repr(file)))
    return {name: path.parent / file for name, file in entries.items()}


def _crc32s(path: Path, header: Header) -> dict[str, int]:
    """Returns the sums our own files carry; files of others have none."""
    text = header.metadata.get(CRC_KEY)
    if text is None:
        return {}
    try:
        sums = json.loads(text)
    except ValueError as error:
        raise InputError(_problem(path, CRC_KEY, "broken metadata")) from error
    if not isinstance(sums, dict) or not all(type(v) is int for v in sums.values()):
        raise InputError(_problem(path, CRC_KEY, "broken metadata"))
    return sums


class _Reader:
    """Reads tensors, keeping the file of the last one open."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = places
        self._path: Path | None = None
        self._file: Any = None

    def tensor(self, name: str) -> Tensor:
        """Returns a stored tensor, its sum checked where one is recorded."""
        place = self._places[name]
        try:
            if place.file != self._path:
                self._file, self._path = safe_open(place.file, framework="pt"), place.file
            tensor: Tensor = self._file.get_tensor(place.name)
        except (SafetensorError, OSError) as error:
            raise InputError(_problem(place.file, name, f"cannot be read: {error}")) from error
        if place.crc32 is not None and tensor_crc32(tensor) != place.crc32:
            raise InputError(
                _problem(place.file, name, "its bytes are not those that were written")
            )
        return tensor


def read_tensors(
    checkpoint: Checkpoint,
    *,
    layers: Iterable[int] | None = None,
    experts: range | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors by the names of `flopwright.spec.parameters`, one in memory at a time.

    A tied head is not among them.

    Args:
        layers: which layers to read (-1 the embeddings, num_layers the final norm and head).
        experts: which routed experts; stacked tensors then hold these alone.
        dtype: to cast weights to, the router's selection bias excepted; as stored by default.

    Raises:
        InputError: a tensor whose bytes cannot be read or are not those that were written.
    """
    spec, reader = checkpoint.spec, _Reader(checkpoint.places)
    for layer in range(-1, spec.num_layers + 1) if layers is None else layers:
        if layer == -1 and "lm_head.weight" in checkpoint.places and spec.tied_embeddings:
            _check_tied(checkpoint, reader)
        yield from _layer_tensors(spec, layer, experts, dtype, reader)


def _layer_tensors(
    spec: ModelSpec,
    layer: int,
    experts: range | None,
    dtype: torch.dtype | None,
    reader: _Reader,
) -> Iterator[tuple[str, Tensor]]:
    params = {p.name: p for p in layer_parameters(spec, layer) if not p.tied}
    wanted = [s for s in stored_tensors(spec, [layer]) if _held(s, experts)]
    left = {name: sum(p.name == name for s in wanted for p in s.parts) for name in params}
    filled: dict[str, Tensor] = {}
    for stored in wanted:
        source = reader.tensor(stored.name)
        source = source.t() if stored.transposed else source
        start = 0
        for part in stored.parts:
            p, rows = params[part.name], part.last - part.first
            if len(stored.parts) == 1 and part.expert is None:
                source = source.reshape(p.shape)
            piece = source[start : start + rows]
            start += rows
            target = dtype if dtype is not None and p.trainable else piece.dtype
            if part.expert is None:
                filled[p.name] = piece.to(target).contiguous()
            else:
                first = experts.start if experts is not None else 0
                if p.name not in filled:
                    count = len(experts) if experts is not None else p.shape[0]
                    filled[p.name] = torch.empty((count, *p.shape[1:]), dtype=target)
                filled[p.name][part.expert - first, part.first : part.last] = piece
            left[p.name] -= 1
            if left[p.name] == 0:
                yield p.name, filled.pop(p.name)


def _held(stored: Stored, experts: range | None) -> bool:
    expert = stored.parts[0].expert
    return expert is None or experts is None or expert in experts


def _check_tied(checkpoint: Checkpoint, reader: _Reader) -> None:
    """Refuses a stored head that differs from the embedding it is said to be."""
    stored = next(stored_tensors(checkpoint.spec, [-1])).name
    if not torch.equal(reader.tensor("lm_head.weight"), reader.tensor(stored)):
        place = checkpoint.places["lm_head.weight"]
        rule = f"differs from {stored}, although the config says that they are tied"
        raise InputError(_problem(place.file, place.name, rule))
