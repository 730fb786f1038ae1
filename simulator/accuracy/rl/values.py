"""What a cell of the value column says: numbers, ranges, bounds, several values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_NUMBER: Final = r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
# Units of the column in SI; what is not named keeps its number (tokens/s, versions, counts).
_SCALE: Final = {
    "h": 3600.0,
    "ms": 1e-3,
    "min": 60.0,
    "%": 0.01,
    "k tokens/s": 1e3,
}


@dataclass(frozen=True, slots=True)
class Value:
    """One measured value in SI: a number where low and high are equal, else a range."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The number, or the middle of the range."""
        return (self.low + self.high) / 2

    def error(self, predicted: float) -> float:
        """Returns predicted / measured - 1; 0 inside a range, else from its nearer end."""
        if self.low <= predicted <= self.high and self.low < self.high:
            return 0.0
        near = self.low if predicted < self.low else self.high
        return predicted / near - 1 if near else float("inf")


def parse_value(text: str, unit: str) -> tuple[Value, ...]:
    """Returns the values of a cell: one, or several of "a -> b" and "a/b/c".

    "<x" and "~x" are read as x; "a-b" is a range. A cell in words gives the times named in it
    ("rank0 73.1 s (...); ..."), or nothing.
    """
    scale = _SCALE.get(unit.strip(), 1.0)
    bare = text.strip().lstrip("<>~≤≥").strip()
    if "->" in bare:
        parts = bare.split("->")
    elif re.fullmatch(rf"{_NUMBER}(?:/{_NUMBER})+", bare):
        parts = bare.split("/")
    else:
        parts = [bare]
    values = [_one(part.strip()) for part in parts]
    if all(v is not None for v in values):
        return tuple(Value(v.low * scale, v.high * scale) for v in values if v is not None)
    found = re.findall(rf"({_NUMBER}) s\b", text)
    return tuple(Value(float(x), float(x)) for x in found)


def _one(text: str) -> Value | None:
    text = text.lstrip("~").strip()
    if re.fullmatch(_NUMBER, text):
        return Value(float(text), float(text))
    span = re.fullmatch(rf"({_NUMBER})\s*[-–]\s*({_NUMBER})", text)
    if span:
        return Value(float(span[1]), float(span[2]))
    leading = re.match(rf"({_NUMBER}) est$", text)
    return Value(float(leading[1]), float(leading[1])) if leading else None
