"""The model that a published run trained: from its columns, its name, and what both leave open."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.simulator.accuracy.rows import Configuration
from flopwright.spec.flops import Convention, model_flops_per_token
from flopwright.spec.from_columns import GPT_VOCAB, USUAL_HEAD_DIM, model_from_columns
from flopwright.spec.load import load_model
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import num_params
from flopwright.spec.yaml_lines import read_yaml

FACTS: Final = Path(__file__).with_name("model_of_row_facts.yaml")
_SIZES: Final = (
    "hidden", "layers", "heads", "kv_heads", "ffn", "experts", "topk", "moe_ffn", "vocab",
)  # fmt: skip
# Vocabularies of GPT-style models whose table gives only a size in parameters.
_GPT_VOCABS: Final = (GPT_VOCAB, 131_072, 250_880)
_SOURCE: Final = "the model's report or released configuration"
_CONVENTIONS: Final[tuple[Convention, ...]] = ("causal_half", "full")
_WIDTH_STEP: Final = 128
_LAYERS_OFF: Final = 0.05
_HYBRIDS: Final = r"nemotron35?(nano|super|ultra|lightning)|nemotronh|mamba|jamba|zamba|kimilinear"


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
    squeezed = _squeezed(name)
    if re.search(_HYBRIDS, squeezed):
        raise _refused(name, "a hybrid of attention and state-space layers has no cost here")
    columns = {c: configuration.whole(c) for c in _SIZES}
    facts = _facts_of(squeezed, columns)
    family = model_family(name)
    if "catalog" in facts:
        spec = load_model(facts["catalog"])
        depth = columns["layers"] or spec.num_layers
        longer = {"num_layers": depth, "max_seq_len": max(spec.max_seq_len, seq_len)}
        cut = spec.model_copy(update=longer)
        return RowModel(cut, family, spec.num_layers, (f"shape of {facts['catalog']}",))
    assumed: list[str] = []
    given = dict(facts) | {c: v for c, v in columns.items() if v is not None}
    if facts:
        given.setdefault("style", "llama")
        taken = [c for c in _SIZES if columns[c] is None and c in facts]
        if taken:
            assumed.append(f"{', '.join(taken)} by the model's name")
    may_have_mtp = given.pop("mtp", False)
    assumed += [given.pop("note")] if "note" in given else []
    _drop_inconsistent(given, columns)
    _fill(given, configuration, assumed)
    full = int(facts.get("layers") or given["layers"])
    model = model_from_columns(**given, max_seq_len=seq_len, name=_name(name, given["layers"]))
    if not facts:  # of a known model they are no assumptions
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


def _refused(name: str, rule: str) -> InputError:
    return InputError(Violation(field="model", value=repr(name), rule=rule))


def _squeezed(name: str) -> str:
    return re.sub(r"[\s_\-.]", "", name.lower())


def _name(name: str, layers: int) -> str:
    squeezed = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return f"{squeezed or 'model'}_l{layers}"


@cache
def _facts() -> tuple[tuple[str, dict[str, Any]], ...]:
    entries = read_yaml(FACTS).data
    return tuple((e["match"], {k: v for k, v in e.items() if k != "match"}) for e in entries)


def _facts_of(squeezed: str, columns: dict[str, int | None]) -> dict[str, Any]:
    """Returns what is known of a model by its name; nothing where its columns contradict it."""
    for pattern, facts in _facts():
        if re.search(pattern, squeezed):
            clash = (columns["hidden"] or 0) not in (0, facts.get("hidden", columns["hidden"]))
            return {} if clash else facts
    return {}


def _drop_inconsistent(given: dict[str, Any], columns: dict[str, int | None]) -> None:
    """Drops columns that say the same twice or belong to experts where there are none."""
    width = columns["ffn"]
    if width is not None and width == given.get("moe_ffn") and given.get("first_dense_layers"):
        given["first_dense_layers"] = 0  # a cut model whose layers all have experts
    if given.get("experts", 0) in (0, 1):
        for key in ("experts", "topk", "moe_ffn", "shared_experts", "first_dense_layers"):
            given.pop(key, None)
    elif given.get("moe_ffn") is None and given.get("ffn") is not None:
        given["moe_ffn"] = given["ffn"]
    if given.get("latent"):
        given["latent"] = dict(given["latent"])
        given.pop("kv_heads", None)


def _fill(given: dict[str, Any], configuration: Configuration, assumed: list[str]) -> None:
    """Adds the sizes without which there is no model: hidden, layers, and heads that tp cuts."""
    billions = configuration.number("params_total_b")
    name = configuration.text("model")
    if "swiglu" in name.lower():
        given.setdefault("style", "llama")
    if given.get("hidden") is None:
        raise _refused(name, "neither its hidden size nor its name says what shape it has")
    hidden = given["hidden"]
    gated = "swiglu" in name.lower()
    if given.get("vocab") is None and name.lower().startswith("gpt"):
        if given.get("experts") or gated:
            given["vocab"] = GPT_VOCAB
        if gated:
            given.setdefault("tied", "untie" not in configuration.notes.lower())
    if given.get("layers") is None:
        if billions is None:
            raise _refused(name, "its number of layers is not known")
        given["layers"] = _layers_of(billions * 1e9, hidden, configuration.whole("pp") or 1)
        assumed.append(f"layers from 12 * layers * hidden^2 parameters ({given['layers']})")
    if given.get("experts") and given.get("moe_ffn") is None and given.get("ffn") is None:
        _fill_expert_width(given, configuration, assumed)
    if given.get("heads") is None and given.get("latent") is None:
        given["heads"] = _heads_of(hidden, configuration.whole("tp") or 1)
        assumed.append(f"heads ({given['heads']})")
    if _is_gpt(given) and given.get("vocab") is None and billions is not None:
        given["vocab"] = _vocab_of(given, billions * 1e9)
        assumed.append(f"vocabulary nearest to the stated size ({given['vocab']})")


def _fill_expert_width(
    given: dict[str, Any], configuration: Configuration, assumed: list[str]
) -> None:
    """Adds the width of an expert that the stated total and active sizes leave for it.

    They differ by the experts that a token does not see, of three matrices each.
    """
    total, active = (configuration.number(c) for c in ("params_total_b", "params_active_b"))
    named = re.search(r"(\d+(?:\.\d+)?)b-a(\d+(?:\.\d+)?)b", configuration.text("model").lower())
    if named:
        total, active = total or float(named[1]), active or float(named[2])
    idle = given["experts"] - (given.get("topk") or min(2, given["experts"]))
    if total is None or active is None or idle <= 0 or total <= active:
        return
    exact = (total - active) * 1e9 / (3 * given["hidden"] * given["layers"] * idle)
    given["moe_ffn"] = max(1, round(exact / _WIDTH_STEP)) * _WIDTH_STEP
    assumed.append(f"expert width from the total and active sizes ({given['moe_ffn']})")


def _is_gpt(given: dict[str, Any]) -> bool:
    if given.get("style"):
        return str(given["style"]) == "gpt"
    ffn = given.get("ffn")
    return given.get("experts") is None and (
        ffn == 4 * given["hidden"] or (ffn is None and given.get("kv_heads") is None)
    )


def _layers_of(params: float, hidden: int, pp: int) -> int:
    """Returns layers of 12 hidden^2 parameters each; a multiple of pp where one is near."""
    exact = params / (12 * hidden**2)
    even = max(1, round(exact / pp)) * pp
    return even if abs(even / exact - 1) <= _LAYERS_OFF else max(1, round(exact))


def _heads_of(hidden: int, tp: int) -> int:
    """Returns the heads of even width nearest to 128 that tp divides."""
    fits = [h for h in range(tp, hidden + 1, tp) if hidden % h == 0 and hidden // h % 2 == 0]
    return min(fits or [tp], key=lambda h: abs(hidden / h - USUAL_HEAD_DIM))


def _vocab_of(given: dict[str, Any], params: float) -> int:
    def off(vocab: int) -> float:
        spec = model_from_columns(**{**given, "vocab": vocab}).spec
        return abs(num_params(spec) - params)

    return min(_GPT_VOCABS, key=off)
