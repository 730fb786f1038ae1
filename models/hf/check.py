"""A checkpoint's tensors held against a model's: names, shapes, dtypes. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from flopwright.errors import Violation
from flopwright.models.formats.stored import StoredWeight
from flopwright.models.hf.files import problem
from flopwright.models.hf.header import WEIGHT_DTYPES
from flopwright.models.hf.names import Stored, is_derived, is_padded, stored_tensors
from flopwright.spec.model import ModelSpec

_DENSE: Final = re.compile(r"block_sparse_moe\.(?=(gate|up|down)_proj\.)")


def check_weights(
    folder: Path,
    spec: ModelSpec,
    weights: Iterable[StoredWeight],
    config: Mapping[str, Any],
    index: Mapping[str, Path] | None = None,
) -> list[Violation]:
    """Returns everything that keeps these weights from being the model's.

    Args:
        config: of the checkpoint; says how many prediction layers follow the model's own.
        index: the file that should hold a tensor, to name it where it is missing.
    """
    problems, there = [], set[str]()
    expected = {s.name: s for s in stored_tensors(spec)}
    extra, index = _extra_layers(config), index or {}
    for weight in weights:
        name = full_name(weight.name, spec)
        there.add(name)
        if name not in expected:
            if not _ignored(name, spec, extra):
                problems.append(_unexpected(weight))
            continue
        if not _fits(weight, expected[name]):
            shapes = (str(list(weight.plain_shape)), str(list(expected[name].shape)))
            problems.append(problem(weight.file, weight.name, "wrong shape", *shapes))
        span = weight.parts.get("")
        if span is not None and span.dtype not in WEIGHT_DTYPES:
            rule, known = "this dtype cannot be read as weights", ", ".join(WEIGHT_DTYPES)
            problems.append(problem(span.file, span.name, rule, span.dtype, known))
    for name in expected:
        if name not in there:
            where = index.get(name) or index.get(name.removeprefix("transformer."))
            problems.append(problem(where or folder, name, "the tensor is missing"))
    return problems


def _fits(weight: StoredWeight, stored: Stored) -> bool:
    shape = weight.plain_shape
    if is_padded(stored) and len(shape) == 1:
        return shape >= stored.shape
    return shape == stored.shape


def _unexpected(weight: StoredWeight) -> Violation:
    rule = "unexpected tensor: the model has none of this name"
    scales = weight.name.endswith((".weight_scale_inv", ".weight_scale", "_scales"))
    fix = "config.json must name the format in its quantization_config" if scales else ""
    return Violation(file=str(weight.file), field=weight.name, rule=rule, nearest_fix=fix)


def full_name(name: str, spec: ModelSpec) -> str:
    """Returns a tensor's released name: GPT-2's first release left a prefix out.

    transformers 5 writes Kimi Linear's dense layer under the name of its experts' block.
    """
    bare = spec.family == "gpt2" and name.split(".")[0] in {"h", "wte", "wpe", "ln_f"}
    if spec.family == "kimi_linear":
        return _DENSE.sub("mlp.", name)
    return f"transformer.{name}" if bare else name


def _extra_layers(config: Mapping[str, Any]) -> int:
    """Returns how many multi-token prediction layers follow the model's own."""
    counts = [config.get(n) for n in ("num_nextn_predict_layers", "num_mtp_layers")]
    return max((c for c in counts if type(c) is int), default=0)


def _ignored(name: str, spec: ModelSpec, extra_layers: int) -> bool:
    """Returns whether a tensor that the model lacks is known to be no loss."""
    if is_derived(name) or (name == "lm_head.weight" and spec.tied_embeddings):
        return True
    if spec.family == "kimi_k3" and not name.startswith("language_model."):
        return True  # its vision tower
    first = spec.num_layers
    return any(name.startswith(f"model.layers.{first + i}.") for i in range(extra_layers))
