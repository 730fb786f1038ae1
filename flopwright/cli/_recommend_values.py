"""Amounts in the options of `flopwright recommend`: times, money, compute."""

from __future__ import annotations

import re
from typing import Final

from flopwright.errors import InputError, Violation
from flopwright.units import parse_quantity

_GPU_TIME: Final = {"GPU-days": 1.0, "GPU-hours": 1 / 24, "GPU-years": 365.25}


def violation(field: str, value: str, rule: str, fix: str) -> Violation:
    """Returns a violation."""
    return Violation(field=field, value=value, rule=rule, nearest_fix=fix)


def seconds_of(text: str) -> float:
    """Returns the seconds of a deadline, such as 30d.

    Raises:
        InputError: not a time above zero.
    """
    try:
        seconds = parse_quantity(text, "seconds")
    except ValueError as error:
        fix = "write it like 30d, 12h or 90min"
        raise InputError(violation("--deadline", text, str(error), fix)) from error
    return _positive("--deadline", text, seconds)


def usd_of(text: str) -> float:
    """Returns an amount of money, such as 2M or $500k.

    Raises:
        InputError: not an amount above zero.
    """
    bare = re.sub(r"^\$|\s*USD$", "", text.strip())
    try:
        dollars = parse_quantity(bare, "tokens")
    except ValueError as error:
        fix = "write it like 2M, 500k or 1234567"
        raise InputError(violation("--budget", text, "not an amount in USD", fix)) from error
    return _positive("--budget", text, dollars)


def compute_of(text: str) -> tuple[float | None, float | None]:
    """Returns (FLOPs, None) or (None, GPU-days).

    Raises:
        InputError: neither, or not above zero.
    """
    match = re.fullmatch(r"\s*(\S+?)\s*(GPU-(?:days|hours|years))\s*", text)
    fix = "write it like '1e24 FLOP', '2000 GPU-days' or '5M GPU-hours'"
    bare = re.fullmatch(r"\s*[\d.]+([eE]\+?\d+)?\s*", text) is not None
    try:
        if match is not None:
            days = parse_quantity(match[1], "tokens") * _GPU_TIME[match[2]]
            return None, _positive("--compute-optimal", text, days)
        flops = parse_quantity(f"{text} FLOP" if bare else text, "flops")
    except ValueError as error:
        message = violation("--compute-optimal", text, "not an amount of compute", fix)
        raise InputError(message) from error
    return _positive("--compute-optimal", text, flops), None


def _positive(field: str, text: str, value: float) -> float:
    if value <= 0:
        raise InputError(violation(field, text, "must be above zero", ""))
    return value
