"""The model that a published run trained: from its columns, its name, and what both leave open."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from flopwright.simulator.accuracy.model_of_row_fill import drop_inconsistent, fill
from flopwright.simulator.accuracy.model_of_row_names import (
    MOST_OFF_A_NAME,
    facts_of,
    refused,
    size_of_name,
    without_cost,
)
from flopwright.simulator.accuracy.rows import Configuration
from flopwright.spec.flops import Convention, model_flops_per_token
from flopwright.spec.from_columns import ColumnModel, model_from_columns
from flopwright.spec.load import load_model
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import num_params

_SIZES: Final = (
    "hidden", "layers", "heads", "kv_heads", "ffn", "experts", "topk", "moe_ffn", "vocab",
)  # fmt: skip
_SOURCE: Final = "the model's report or released configuration"
_CONVENTIONS: Final[tuple[Convention, ...]] = ("causal_half", "full")
# A block that gives a size this much off the stated one is tried as the other kinds of block.
_MOST_OFF_A_SIZE: Final = 0.05
_STYLES: Final = ("llama", "gpt", "nemotron")


@dataclass(frozen=True, slots=True)
class RowModel:
    """A run's model.

    Attributes:
        family: canonical name, without depth, spelling and kind of training.
        full_layers: layers of the model that the run's stands for; its own where it is whole.
        assumed: what neither the columns nor the name said, one sentence each.
    """

    spec: ModelSpec
    family: str
    full_layers: int
    assumed: tuple[str, ...]

    @property
    def is_reduced(self) -> bool:
        """Whether the run's model is cut in depth."""
        return self.spec.num_layers < self.full_layers


def model_family(name: str) -> str:
    """Returns a model's canonical name: one for all spellings, depths and kinds of training."""
    text = name.lower()
    if "bloom" in text:
        return "bloom"
    text = re.sub(r"\([^)]*\)", " ", text)
    text = re.sub(
        r"\b(q?lora|sft|r\d+|full|fine-?tune|finetuning|proxy|pretrain|cut|layers?|model"
        r"|l\d+|h\d+ l\d+)\b",
        lambda m: m[0] if m[0].startswith("h") else " ",
        text,
    )
    text = re.sub(r"\bl\d+\b", " ", text)
    squeezed = re.sub(r"[\s_\-.]", "", text)
    return re.sub(r"^(meta)?llama3[123](?=\d+b)", "llama3", squeezed) or squeezed


def model_of(configuration: Configuration, seq_len: int) -> RowModel:
    """Returns the model of a configuration.

    Raises:
        InputError: a model of a kind that the library has no cost of, or of which too little
            is known.
    """
    name = configuration.text("model")
    why = without_cost(name)
    if why is not None:
        raise refused(name, why)
    columns = {c: configuration.whole(c) for c in _SIZES}
    stated = configuration.number("params_total_b")
    facts = facts_of(name, columns, size_of_name(name) or stated)
    if "catalog" in facts:
        spec = load_model(facts["catalog"])
        depth = columns["layers"] or spec.num_layers
        longer = {"num_layers": depth, "max_seq_len": max(spec.max_seq_len, seq_len)}
        cut = spec.model_copy(update=longer)
        family = model_family(name)
        return RowModel(cut, family, spec.num_layers, (f"shape of {facts['catalog']}",))
    model = _model(configuration, seq_len, columns, facts)
    if facts and _is_another(model, columns, size_of_name(name), stated):
        model = _model(configuration, seq_len, columns, {})
    return model


def _is_another(
    model: RowModel,
    columns: dict[str, int | None],
    named: float | None,
    stated: float | None,
) -> bool:
    """Returns whether a model known by its name is far from the size that name or row give."""
    if model.is_reduced or columns["layers"] not in (None, model.full_layers):
        return False
    size = num_params(model.spec) / 1e9
    sizes = [s for s in (named, stated) if s is not None]
    return bool(sizes) and all(abs(size / s - 1) > MOST_OFF_A_NAME for s in sizes)


def _model(
    configuration: Configuration,
    seq_len: int,
    columns: dict[str, int | None],
    facts: dict[str, Any],
) -> RowModel:
    name = configuration.text("model")
    family = model_family(name)
    assumed: list[str] = []
    given = dict(facts) | {c: v for c, v in columns.items() if v is not None}
    if facts:
        given.setdefault("style", "llama")
        taken = [c for c in _SIZES if columns[c] is None and c in facts]
        if taken:
            assumed.append(f"{', '.join(taken)} by the model's name")
    may_have_mtp = given.pop("mtp", False)
    assumed += [given.pop("note")] if "note" in given else []
    drop_inconsistent(given, columns)
    fill(given, configuration, assumed)
    full = int(facts.get("layers") or given["layers"])
    model = model_from_columns(**given, max_seq_len=seq_len, name=_name(name, given["layers"]))
    if not facts:  # of a known model they are no assumptions
        model = _of_stated_size(model, given, configuration, seq_len)
        assumed += model.assumptions
    spec = model.spec
    if facts:
        spec = spec.model_copy(update={"source": _SOURCE})
    if may_have_mtp:
        spec = _with_mtp(spec, configuration, seq_len, assumed)
    return RowModel(spec, family, max(full, given["layers"]), tuple(assumed))


def _with_mtp(
    spec: ModelSpec, configuration: Configuration, seq_len: int, assumed: list[str]
) -> ModelSpec:
    """Returns a model with the MTP module that its stated FLOPs of a token count, or without."""
    rate = configuration.value("model_tflops_per_gpu")
    tokens = configuration.value("tokens_per_s_per_gpu")
    total, gpus = configuration.value("tokens_per_s"), configuration.whole("n_gpus")
    if tokens is None and total is not None and gpus is not None:
        tokens = total / gpus
    with_it = spec.model_copy(update={"mtp_layers": 1})
    if rate is None or tokens is None:
        assumed.append("no MTP module")
        return spec

    def off(model: ModelSpec) -> float:
        counted = (model_flops_per_token(model, seq_len, c) for c in _CONVENTIONS)
        return min(abs(rate * 1e12 / tokens / f - 1) for f in counted)

    return min((spec, with_it), key=off)


def _name(name: str, layers: int) -> str:
    squeezed = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return f"{squeezed or 'model'}_l{layers}"


def _of_stated_size(
    model: ColumnModel, given: dict[str, Any], configuration: Configuration, seq_len: int
) -> ColumnModel:
    """Returns the model with the kind of block that the stated size speaks for."""
    stated = configuration.number("params_total_b")
    if stated is None or given.get("experts") or given.get("style") or configuration.whole("ffn"):
        return model

    def off(found: ColumnModel) -> float:
        return abs(num_params(found.spec) / (stated * 1e9) - 1)

    if off(model) <= _MOST_OFF_A_SIZE:
        return model
    name = model.spec.name
    others = [
        model_from_columns(**{**given, "style": style}, max_seq_len=seq_len, name=name)
        for style in _STYLES
    ]
    best = min(others, key=off)
    return best if off(best) <= _MOST_OFF_A_SIZE else model
