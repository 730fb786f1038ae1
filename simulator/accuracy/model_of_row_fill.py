"""Sizes of a model that neither its row nor its name gives: from its parameters, or as usual."""

from __future__ import annotations

import re
from typing import Any, Final

from flopwright.simulator.accuracy.model_of_row_names import refused, shape_of_size, size_of_name
from flopwright.simulator.accuracy.rows import Configuration
from flopwright.spec.from_columns import GPT_VOCAB, USUAL_HEAD_DIM, model_from_columns
from flopwright.spec.parameters import num_params

# Vocabularies of GPT-style models whose table gives only a size in parameters.
_GPT_VOCABS: Final = (GPT_VOCAB, 131_072, 250_880)
_WIDTH_STEP: Final = 128
_LAYERS_OFF: Final = 0.05


def drop_inconsistent(given: dict[str, Any], columns: dict[str, int | None]) -> None:
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


def fill(given: dict[str, Any], configuration: Configuration, assumed: list[str]) -> None:
    """Adds the sizes without which there is no model: hidden, layers, and heads that tp cuts."""
    billions = configuration.number("params_total_b")
    name = configuration.text("model")
    if "swiglu" in name.lower():
        given.setdefault("style", "llama")
    if given.get("hidden") is None:
        _fill_shape(given, configuration, assumed)
    hidden = given["hidden"]
    gated = "swiglu" in name.lower()
    if given.get("vocab") is None and name.lower().startswith("gpt"):
        if given.get("experts") or gated:
            given["vocab"] = GPT_VOCAB
        if gated:
            given.setdefault("tied", "untie" not in configuration.notes.lower())
    if given.get("layers") is None:
        if billions is None:
            raise refused(name, "its number of layers is not known")
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


def _fill_shape(given: dict[str, Any], configuration: Configuration, assumed: list[str]) -> None:
    """Adds a usual shape of a dense model of which only the size is known."""
    name = configuration.text("model")
    billions = configuration.number("params_total_b") or size_of_name(name)
    experts = given.get("experts") or configuration.number("params_active_b")
    if billions is None or experts or re.search(r"moe|\d ?x ?\d|\ba\d+(\.\d+)?b", name.lower()):
        raise refused(name, "neither its hidden size nor its name says what shape it has")
    if given.get("layers") is None:
        given["hidden"], given["layers"] = shape_of_size(billions, configuration.whole("pp") or 1)
    else:
        exact = (billions * 1e9 / (12 * given["layers"])) ** 0.5
        given["hidden"] = max(1, round(exact / _WIDTH_STEP)) * _WIDTH_STEP
    if "gpt" not in name.lower():
        given.setdefault("style", "llama")
    assumed.append(
        f"a usual shape for {billions:g} billion parameters: "
        f"hidden {given['hidden']}, {given['layers']} layers"
    )


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
