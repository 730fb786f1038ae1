"""What a model's name says: which public model it is, how large, whether it has a cost here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.spec.yaml_lines import read_yaml

FACTS: Final = Path(__file__).with_name("model_of_row_facts.yaml")
_KINDS_WITHOUT_COST: Final = (
    (r"nemotron35?(nano|super|ultra|lightning)|nemotron(5|h)|nemotronnano|mamba|jamba|zamba"
     r"|kimilinear|minimax(text|m1)|griffin|rwkv|retnet|hyena|falconh1|bamba",
     "a hybrid of attention and state-space layers has no cost here"),
    (r"nemotron(ultra|super)|llama3[123]nemotron(ultra|super|51b)",
     "its layers have different shapes, which has no cost here"),
    (r"^(google/?)?(flan)?t5|^mt5|bert|whisper|llava|internvl|vl\d|vision|sdxl|stablediffusion|flux1"
     r"|^dit|^vit|clip|switchbase|ul2",
     "is no decoder of text alone, and has no cost here"),
)  # fmt: skip
_MOST_OFF_A_SIZE: Final = 0.07
# A shape of another size than its name is another model; the sizes in names are rounded.
MOST_OFF_A_NAME: Final = 0.4
_USUAL_VOCAB: Final = 32_000
_USUAL_ASPECT: Final = 128.0
_SCALES: Final = {"m": 1e-3, "b": 1.0, "t": 1e3}


def without_cost(name: str) -> str | None:
    """Returns why a model of this name has no cost in the library; None if it may have one."""
    text = squeezed(name)
    return next((why for pattern, why in _KINDS_WITHOUT_COST if re.search(pattern, text)), None)


def refused(name: str, rule: str) -> InputError:
    """Returns the error of a model that cannot be made."""
    return InputError(Violation(field="model", value=repr(name), rule=rule))


def squeezed(name: str) -> str:
    """Returns a name in lower case without separators; a distilled model's as its student's."""
    text = re.sub(r"[\s_\-.]", "", name.lower())
    text = re.sub(r"deepseekr1distillqwen", "qwen25", text)
    return re.sub(r"deepseekr1distillllama", "llama31", text)


def size_of_name(name: str) -> float | None:
    """Returns the 10^9 parameters that a name gives in all; None where it gives none.

    Active parameters ("A3B"), experts times a size ("8x7B") and sizes of copied layers are none.
    """
    text = name.lower()
    if re.search(r"\d ?x ?\d+(\.\d+)?b|\d+b[-_ ]\d+e\b", text):
        return None
    text = re.sub(r"(?<=[-_ ])a\d+(\.\d+)?b\b", " ", text)
    odd = re.search(r"(?<![\d.])(\d)b(\d)\b", text)  # BLOOM writes 7b1
    if odd:
        return float(f"{odd[1]}.{odd[2]}")
    found = re.findall(r"(?<![\d.a-z])(\d+(?:\.\d+)?)([mbt])(?![a-z0-9])", text)
    glued = re.findall(r"(?:gpt|llama|opt|palm|bloom|mpt)[-_ ]?(\d+(?:\.\d+)?)([mbt])\b", text)
    sizes = [float(number) * _SCALES[unit] for number, unit in found or glued]
    return max(sizes) if sizes else None


@cache
def _facts() -> tuple[tuple[str, dict[str, Any]], ...]:
    entries = read_yaml(FACTS).data
    return tuple((e["match"], {k: v for k, v in e.items() if k != "match"}) for e in entries)


def facts_of(
    name: str, columns: Mapping[str, int | None], billions: float | None
) -> dict[str, Any]:
    """Returns what is known of a model by its name; nothing where its columns contradict it.

    Args:
        billions: 10^9 parameters by the name or the row, None where neither says.
    """
    text = squeezed(name)
    matching = [f for pattern, f in _facts() if re.search(pattern, text)]
    first = next((f for f in matching if _off(f, billions) <= _MOST_OFF_A_SIZE), None)
    if first is None:
        return {}
    if "billions" in first:
        first = min((f for f in matching if "billions" in f), key=lambda f: _off(f, billions))
    clash = (columns["hidden"] or 0) not in (0, first.get("hidden", columns["hidden"]))
    return {} if clash else {k: v for k, v in first.items() if k != "billions"}


def _off(facts: Mapping[str, Any], billions: float | None) -> float:
    """Returns how far a size is from those that facts are of; 0 where they are of any."""
    if "billions" not in facts:
        return 0.0
    if billions is None:
        return float("inf")
    return float(min(abs(billions / size - 1) for size in facts["billions"]))


def shape_of_size(billions: float, pp: int) -> tuple[int, int]:
    """Returns (hidden, layers) of a plain decoder of so many parameters, pp dividing its layers.

    12 * layers * hidden^2 parameters beside the vocabulary's, and a hidden size near 128 a layer,
    as models of 1 to 500 billion have (arXiv 2005.14165, table 2.1; 2302.13971, table 2).
    """
    best, score = (128, 1), float("inf")
    for hidden in (*range(256, 4096, 256), *range(4096, 32768, 1024)):
        exact = (billions * 1e9 - 2 * _USUAL_VOCAB * hidden) / (12 * hidden**2)
        if exact <= 0:
            continue
        layers = max(1, round(exact / pp)) * pp
        far = 20 * abs(layers / exact - 1) + abs(math.log(hidden / layers / _USUAL_ASPECT))
        if far < score:
            best, score = (hidden, layers), far
    return best
