"""Quantities with units: parsed once at the file boundary, SI inside.

Inside the program a quantity is a plain number in SI base units whose name carries the
unit (`_s`, `_bytes`, `_flops`, `_bytes_per_s`, `_flops_per_s`). In files it is a string
with its unit ("80 GiB", "450 GB/s", "400 Gbit/s", "989 TFLOP/s", "10 us"). Bandwidths are
per direction and per GPU; peaks are dense. Spellings with two readings are refused, and
the message gives both.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_SI: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_IEC: Final[dict[str, float]] = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_TIME: Final = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_QUANTITY: Final = re.compile(
    r"^\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s].*?)?\s*$"
)

GIB: Final = 2**30


def _table() -> dict[str, dict[str, float]]:
    def prefixed(unit: str, table: dict[str, float]) -> dict[str, float]:
        return {p + unit: f for p, f in table.items()}

    to_bytes = prefixed("B", {k: v for k, v in _SI.items() if k != "K"}) | prefixed("B", _IEC)
    per_s = {f"{u}/s": f for u, f in to_bytes.items()}
    per_s |= {f"{p}bit/s": f / 8 for p, f in _SI.items()}
    return {
        "bytes": to_bytes,
        "seconds": dict(_TIME),
        "bytes_per_s": per_s,
        "flops_per_s": {f"{p}FLOP/s": f for p, f in _SI.items()},
        "flops": {f"{p}FLOP": f for p, f in _SI.items()},
        "watts": {"W": 1.0, "kW": 1e3, "MW": 1e6},
        "usd_per_hour": {"USD/h": 1.0},
        "tokens": {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20},
    }


_UNITS: Final = _table()
_EXAMPLES: Final = {
    "bytes": "80 GiB",
    "seconds": "10 us",
    "bytes_per_s": "450 GB/s or 400 Gbit/s",
    "flops_per_s": "989 TFLOP/s",
    "flops": "3.03e24 FLOP",
    "watts": "700 W",
    "usd_per_hour": "2.50 USD/h",
    "tokens": "15.5T or 4096",
}


def _ambiguous(number: float, unit: str) -> str | None:
    """Returns both readings of a spelling that people use for two things, or None."""
    match = re.fullmatch(r"([KkMGTP]?)(b|bps|b/s|Bps)", unit)
    if match:
        prefix, rest = match.groups()
        if rest == "Bps":
            return (
                f"'{unit}' is read both ways: write '{number:g} {prefix}B/s' (bytes) "
                f"or '{number:g} {prefix}bit/s' (bits)"
            )
        per_s = "" if rest == "b" else "/s"
        return (
            f"'{unit}' is read both ways: write '{number:g} {prefix}B{per_s}' (bytes) "
            f"or '{number:g} {prefix}bit{per_s}' (bits)"
        )
    if unit in {"FLOPS", "TFLOPS", "GFLOPS", "PFLOPS", "FLOPs", "TFLOPs"}:
        prefix = unit[0] if unit[0] in "TGP" else ""
        return (
            f"'{unit}' is read both ways: write '{number:g} {prefix}FLOP/s' (a rate) "
            f"or '{number:g} {prefix}FLOP' (a count)"
        )
    return None


def parse_quantity(text: object, dimension: str, *, hbm: bool = False) -> float:
    """Returns `text` in SI base units.

    Args:
        text: a number with its unit, e.g. "80 GiB".
        dimension: one of bytes, seconds, bytes_per_s, flops_per_s, flops, watts,
            usd_per_hour, tokens. Only tokens may come as a bare number.
        hbm: GPU memory, where a decimal 'GB' is refused: vendors write GB and mean GiB.

    Raises:
        ValueError: no unit, an unknown unit, an ambiguous one, or a negative or
            non-finite number; the message names a spelling that works.
    """
    units = _UNITS[dimension]
    example = _EXAMPLES[dimension]
    if isinstance(text, bool) or not isinstance(text, (int, float, str)):
        raise ValueError(f"expected a quantity such as {example}, got {type(text).__name__}")  # noqa: TRY004
    match = _QUANTITY.match(str(text))
    if match is None:
        raise ValueError(f"expected a quantity such as {example}, got {text!r}")
    number, unit = float(match.group(1).replace("_", "")), match.group(2) or ""
    readings = _ambiguous(number, unit)
    if readings:
        raise ValueError(readings)
    if unit not in units:
        what = "has no unit" if not unit else f"has the unknown unit '{unit}'"
        raise ValueError(f"{text!r} {what} for {dimension}; write it like {example}")
    if hbm and unit in {"GB", "MB", "TB"}:
        gib = number * units[unit] / GIB
        raise ValueError(
            f"{text!r} of GPU memory is read both ways: {number:g} {unit} = {gib:.1f} GiB; "
            f"write '{gib:.1f} GiB' for decimal, "
            f"or '{number:g} GiB' if you mean the nvidia-smi number"
        )
    value = number * units[unit]
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text!r} must be finite and not negative")
    return value


def _format(value: float, steps: list[tuple[float, str]]) -> str:
    """Returns `value` in the largest unit in which it is at least 1, at full precision."""
    factor, unit = next((step for step in steps if value >= step[0]), steps[-1])
    scaled = value / factor
    text = f"{scaled:.12g}"
    if float(text) * factor != value:
        text = repr(scaled)
    if float(text) * factor != value:  # rounding in the division: fall back to the base unit
        factor, unit = 1.0, steps[-1][1]
        text = repr(value)
    return f"{text} {unit}"


def format_bytes(value: float) -> str:
    """Returns bytes as text that `parse_quantity` reads back exactly, e.g. '80 GiB'."""
    return _format(
        value, [(2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")]
    )


def format_bytes_per_s(value: float) -> str:
    """Returns a bandwidth as text, e.g. '450 GB/s'."""
    return _format(
        value, [(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1, "B/s")]
    )


def format_flops_per_s(value: float) -> str:
    """Returns a FLOP rate as text, e.g. '989 TFLOP/s'."""
    return _format(
        value,
        [(1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1, "FLOP/s")],
    )


def format_seconds(value: float) -> str:
    """Returns a duration as text that reads back exactly, e.g. '10 us'."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")):
        if value >= factor:
            text = f"{value / factor:.12g}"
            if float(text) * factor == value:
                return f"{text} {unit}"
    return f"{value!r} s"


def _three_digits(value: float) -> str:
    """Returns a number to three digits, never in powers of ten above one."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def show_bytes(value: float) -> str:
    """Returns bytes for people, in GiB, MiB, KiB or bytes to three digits."""
    if 0 < value < 2**10:
        return f"{value:.0f} B"
    unit, scale = ("GiB", GIB) if value >= GIB / 10 else ("MiB", 2**20)
    if 0 < value < 2**20 / 10:
        unit, scale = "KiB", 2**10
    return f"{_three_digits(value / scale)} {unit}"


def show_seconds(value: float) -> str:
    """Returns a duration for people: us, ms, s, min, h or days to three digits.

    Less than a nanosecond is nothing: it is what rounding leaves of a difference.
    """
    if value < 1e-9:
        return "0 s"
    steps = ((172_800.0, 86400.0, "days"), (7200.0, 3600.0, "h"), (999.5, 60.0, "min"))
    for least, factor, unit in (*steps, (0.9995, 1.0, "s"), (9.995e-4, 1e-3, "ms")):
        if value >= least:
            return f"{_three_digits(value / factor)} {unit}"
    return f"{value * 1e6:.3g} us"


def show_percent(share: float) -> str:
    """Returns a share for people: 0.15 as "15 %", 0.0234 as "2.3 %", 0.996 as "99.6 %"."""
    value = 100 * share
    if 0 < abs(value) < 0.05:
        return "less than 0.1 %"
    digits = 0 if 9.95 <= abs(value) < 99 else 1
    return f"{value:.{digits}f} %".replace(".0 ", " ")


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun: "1 run", "2,048 GPUs"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def show_count(value: float) -> str:
    """Returns a count for people with a decimal suffix: 15.5T, 32.6B, 67.1M."""
    if value >= 999.95e12:
        return f"{value / 1e12:,.0f}T"
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.4g}{suffix}"
    return f"{value:.4g}"


def _json_text(dimension: str) -> WithJsonSchema:
    bare = dimension == "tokens"
    what = "a count, with or without a suffix" if bare else "a quantity with unit"
    return WithJsonSchema(
        {
            "type": ["number", "string"] if bare else "string",
            "description": f"{what}, e.g. {_EXAMPLES[dimension]}",
            "examples": [_EXAMPLES[dimension].split(" or ")[0]],
        }
    )


def _at_boundary(dimension: str, whole: bool = False, hbm: bool = False) -> BeforeValidator:
    def read(value: Any) -> Any:
        parsed = parse_quantity(value, dimension, hbm=hbm)
        if not whole:
            return parsed
        if abs(parsed - round(parsed)) > 1e-6 * max(1.0, parsed):
            raise ValueError(f"{value!r} is not a whole number of {dimension}")
        return round(parsed)

    return BeforeValidator(read)


Bytes = Annotated[
    int, _at_boundary("bytes", whole=True), PlainSerializer(format_bytes), _json_text("bytes")
]
HbmBytes = Annotated[
    int,
    _at_boundary("bytes", whole=True, hbm=True),
    PlainSerializer(format_bytes),
    _json_text("bytes"),
]
Seconds = Annotated[
    float, _at_boundary("seconds"), PlainSerializer(format_seconds), _json_text("seconds")
]
BytesPerS = Annotated[
    float,
    _at_boundary("bytes_per_s"),
    PlainSerializer(format_bytes_per_s),
    _json_text("bytes_per_s"),
]
FlopsPerS = Annotated[
    float,
    _at_boundary("flops_per_s"),
    PlainSerializer(format_flops_per_s),
    _json_text("flops_per_s"),
]
Watts = Annotated[
    float, _at_boundary("watts"), PlainSerializer(lambda v: f"{v!r} W"), _json_text("watts")
]
UsdPerHour = Annotated[
    float,
    _at_boundary("usd_per_hour"),
    PlainSerializer(lambda v: f"{v!r} USD/h"),
    _json_text("usd_per_hour"),
]
Tokens = Annotated[int, _at_boundary("tokens", whole=True), _json_text("tokens")]
