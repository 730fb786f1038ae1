"""Lengths as they were counted: from a trace of requests, a histogram, or a run's own log."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.simulator.rollouts.lengths import Floats
from flopwright.spec.rollout import EmpiricalLengths

MOST_VALUES: Final = 512  # a law keeps its shape and no trace could be rebuilt from it
_BIN: Final = ("len_lo", "len_hi", "prob")


def empirical_lengths(
    path: str | Path, column: str | None = None, cap: int | None = None
) -> EmpiricalLengths:
    """Returns the law of the lengths in a file, at most 512 values.

    Args:
        path: .csv with a column of lengths, or with len_lo, len_hi, prob (half-open bins); or
            .jsonl, one object a line.
        column: of the lengths; None: output_len, response_length or length, whichever is there.
        cap: the longest completion.

    Raises:
        InputError: the file cannot be read, or has no such column, or no whole positive length.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(Violation(rule=f"cannot be read: {error}", file=str(path))) from error
    rows = list(_records(text, path))
    if not rows:
        raise InputError(Violation(rule="has no rows", file=str(path)))
    if column is None and all(name in rows[0] for name in _BIN):
        low, high, weight = (_numbers(rows, name, path) for name in _BIN)
        return law_of((low + high - 1) / 2, weight, cap)
    values = _numbers(rows, column or _found(rows[0], path), path)
    return law_of(values, np.ones(len(values)), cap)


def law_of(values: Floats, weights: Floats, cap: int | None = None) -> EmpiricalLengths:
    """Returns the law of values with weights; many values become their means in equal shares."""
    order = np.argsort(values, kind="stable")
    values, weights = np.maximum(values[order], 1.0), weights[order]
    unique = np.unique(values)
    if len(unique) > MOST_VALUES:
        share = np.cumsum(weights) / weights.sum()
        bins = np.minimum((share * MOST_VALUES).astype(int), MOST_VALUES - 1)
        total = np.bincount(bins, weights, minlength=MOST_VALUES)
        mean = np.bincount(bins, weights * values, minlength=MOST_VALUES)
        some = total > 0
        values = np.asarray(mean[some] / total[some], dtype=np.float64)
        weights = np.asarray(total[some], dtype=np.float64)
    return EmpiricalLengths.model_validate(
        {
            "values": [max(1, round(v)) for v in values.tolist()],
            "weights": weights.tolist(),
            "cap": cap,
        }
    )


def _records(text: str, path: Path) -> Iterator[dict[str, object]]:
    if path.suffix != ".jsonl":
        yield from csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            rule = f"is not JSON: {error}"
            raise InputError(Violation(rule=rule, file=str(path), line=number)) from error
        if isinstance(entry, dict):
            yield entry


def _found(row: dict[str, object], path: Path) -> str:
    for name in ("output_len", "response_length", "length", "output_tokens"):
        if name in row:
            return name
    names = [str(name) for name in row]
    raise InputError(
        Violation(
            rule=f"has no column of lengths; it has {', '.join(names)}",
            file=str(path),
            nearest_fix="name the column",
        )
    )


def _numbers(rows: list[dict[str, object]], column: str, path: Path) -> Floats:
    if column not in rows[0]:
        fix = did_you_mean(column, [str(name) for name in rows[0]])
        raise InputError(
            Violation(rule=f"has no column {column}", file=str(path), nearest_fix=fix)
        )
    out = []
    for number, row in enumerate(rows, 2):
        try:
            value = float(str(row[column]))
        except (KeyError, ValueError):
            value = math.nan
        if not 0 <= value < 1e12:
            rule = f"{column} must be a number, not {row.get(column)!r}"
            raise InputError(Violation(rule=rule, file=str(path), line=number))
        out.append(value)
    return np.array(out)
