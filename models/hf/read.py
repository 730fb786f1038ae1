"""Reading a released-layout checkpoint: everything is checked first, tensors stream out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flopwright.errors import InputError
from flopwright.models.formats.codecs import check_finite, decode
from flopwright.models.formats.quantization_config import layout_of
from flopwright.models.formats.stored import Span, StoredWeight, spans_of, stored_weights
from flopwright.models.hf.arrange import to_rows
from flopwright.models.hf.check import check_weights, full_name
from flopwright.models.hf.config import CONFIG_FILE, model_from_hf_config
from flopwright.models.hf.fields import read_json
from flopwright.models.hf.files import problem, raise_all, read_headers
from flopwright.models.hf.names import Part, Stored, stored_tensors
from flopwright.models.hf.write import tensor_crc32
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import layer_parameters


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose files hold exactly the tensors of a model, by headers and sizes."""

    folder: Path
    spec: ModelSpec
    places: Mapping[str, StoredWeight]


def open_checkpoint(folder: Path, spec: ModelSpec | None = None) -> Checkpoint:
    """Returns a checkpoint after checking all of it but the tensors' values.

    Args:
        folder: config.json beside `model.safetensors`, or beside shards with their index;
            weights plain, or in a format of `models/formats`.
        spec: the model it must hold; by default the one its config.json describes.

    Raises:
        InputError: a missing, corrupt or truncated file; a tensor that is missing, unexpected,
            of a wrong shape or of a dtype that is no weight; scales that are missing or do not
            fit; each with file and tensor.
    """
    config_file = folder / CONFIG_FILE
    if spec is None:
        spec = model_from_hf_config(config_file)
    config = read_json(config_file) if config_file.is_file() else {}
    headers, index = read_headers(folder)
    spans, problems = spans_of(headers)
    weights, wrong = stored_weights(spans, layout_of(config, str(config_file)))
    wrong.extend(check_weights(folder, spec, weights, config, index))
    raise_all([*problems, *wrong])
    return Checkpoint(folder, spec, {full_name(w.name, spec): w for w in weights})


class _Reader:
    """Reads tensors, keeping the file of the last one open."""

    def __init__(self, places: Mapping[str, StoredWeight]) -> None:
        self._places = places
        self._path: Path | None = None
        self._file: Any = None

    def tensor(self, name: str) -> Tensor:
        """Returns a stored tensor, sums checked where they are recorded; fp32 if it was coded."""
        weight = self._places[name]
        parts = {ending: self._span(span) for ending, span in weight.parts.items()}
        if weight.layout is None:
            return parts[""]
        tensor = check_finite(decode(weight.layout, parts), name, str(weight.file))
        return tensor.transpose(-1, -2) if weight.layout.stacked else tensor

    def _span(self, span: Span) -> Tensor:
        try:
            if span.file != self._path:
                self._file, self._path = safe_open(span.file, framework="pt"), span.file
            tensor: Tensor = self._file.get_tensor(span.name)
        except (SafetensorError, OSError) as error:
            raise InputError(problem(span.file, span.name, f"cannot be read: {error}")) from error
        if span.crc32 is not None and tensor_crc32(tensor) != span.crc32:
            rule = "its bytes are not those that were written"
            raise InputError(problem(span.file, span.name, rule))
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
    parts = [p for s in wanted for p in s.parts if _wanted(p, experts)]
    left = {name: sum(p.name == name for p in parts) for name in params}
    filled: dict[str, Tensor] = {}
    for stored in wanted:
        source = to_rows(stored, reader.tensor(stored.name))
        start = 0
        for part in stored.parts:
            p, rows = params[part.name], part.last - part.first
            if len(stored.parts) == 1 and part.expert is None:
                source = source.reshape(p.shape)
            piece = source[start : start + rows]
            start += rows
            if not _wanted(part, experts):
                continue
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
    return any(_wanted(part, experts) for part in stored.parts)


def _wanted(part: Part, experts: range | None) -> bool:
    return part.expert is None or experts is None or part.expert in experts


def _check_tied(checkpoint: Checkpoint, reader: _Reader) -> None:
    """Refuses a stored head that differs from the embedding it is said to be."""
    stored = next(stored_tensors(checkpoint.spec, [-1])).name
    if not torch.equal(reader.tensor("lm_head.weight"), reader.tensor(stored)):
        file = checkpoint.places["lm_head.weight"].file
        rule = f"differs from {stored}, although the config says that they are tied"
        raise InputError(problem(file, "lm_head.weight", rule))
