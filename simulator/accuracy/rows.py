"""Published measurements as configurations: which rows belong together, and what they measure.

A file holds one metric a row. Rows of one configuration share their id up to the last "-"
where that names the metric; elsewhere they share every column that describes a run.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from flopwright.errors import InputError, Violation
from flopwright.simulator.accuracy.rows_units import (
    MEMORIES,
    SPEEDS,
    in_si,
    metric_name,
    positive,
)

COLUMNS: Final = (
    "id", "source", "year", "model", "params_total_b", "params_active_b", "hidden", "layers",
    "heads", "kv_heads", "ffn", "experts", "topk", "moe_ffn", "vocab", "seq", "gpu", "n_gpus",
    "tp", "pp", "vpp", "dp", "ep", "etp", "cp", "sp", "zero_or_fsdp", "mbs", "gbs", "recompute",
    "offload", "precision", "framework", "metric", "value", "unit", "notes",
)  # fmt: skip
_OF_A_VALUE: Final = frozenset({"id", "metric", "value", "unit", "notes"})
_EMPTY: Final = frozenset({"", "nan", "n/a", "na", "null", "-", "?", "unknown"})
# Whole numbers beyond this are no sizes of a run, and would not fit a record.
_MOST: Final = 2**53
_TOO_LONG: Final = "beyond the last column"
_IN_K: Final = frozenset({"seq"})  # lengths are written "8K" for 8,192


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured value, in SI (seconds, bytes, per second); `row_id` is its row's."""

    row_id: str
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Configuration:
    """The rows of one run.

    Attributes:
        id: what the rows' ids share.
        cells: text by column; "" where the file leaves it open.
        metrics: every readable value.
        notes: the rows' notes, each once.
    """

    id: str
    cells: Mapping[str, str]
    metrics: tuple[Metric, ...]
    notes: str

    @property
    def row_ids(self) -> tuple[str, ...]:
        """Ids of the rows."""
        return tuple(m.row_id for m in self.metrics)

    def text(self, column: str) -> str:
        """Returns a cell's text, "" where it says nothing."""
        return self.cells.get(column, "")

    def number(self, column: str) -> float | None:
        """Returns a cell's number; None where it holds none that is finite and above zero."""
        text = self.text(column)
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kK])", text.strip()) if column in _IN_K else None
        return float(found[1]) * 1024 if found else positive(text)

    def whole(self, column: str) -> int | None:
        """Returns a cell's whole number; None where it holds none above zero."""
        value = self.number(column)
        if value is None or value != round(value) or value > _MOST:
            return None
        return int(value)

    def value(self, metric: str) -> float | None:
        """Returns the median of a metric's values, None without any."""
        values = [m.value for m in self.metrics if m.name == metric]
        return median(values) if values else None


def read_configurations(
    path: Path,
) -> tuple[tuple[Configuration, ...], tuple[tuple[str, str], ...]]:
    """Returns the configurations of a file, and the rows that hold no value, with the reason.

    Raises:
        InputError: no file there, or not one of measured runs.
    """
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    repeats: dict[tuple[str, ...], int] = {}
    skipped: list[tuple[str, str]] = []
    for number, record in _records(path):
        row = {name: _text(record.get(name)) for name in COLUMNS}
        row["id"] = row["id"] or f"line {number}"
        if _TOO_LONG in record:
            skipped.append((row["id"], "more cells than the table has columns"))
            continue
        if not row["metric"]:
            skipped.append((row["id"], "no metric is named"))
            continue
        key = _group(row)
        # A metric that comes twice is a second run whose difference no column shows.
        times = repeats.setdefault((*key, row["metric"]), 0)
        repeats[(*key, row["metric"])] = times + 1
        groups.setdefault((*key, str(times)), []).append(row)
    found = []
    for rows in groups.values():
        configuration = _configuration(rows)
        if configuration.metrics:
            found.append(configuration)
        skipped.extend((r["id"], _unread(r)) for r in rows if _metric(r) is None)
    return tuple(found), tuple(skipped)


def _records(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Returns (line, cells by column) of every row; blank lines are none."""
    if not path.is_file():
        raise InputError(Violation(file=str(path), rule="no such file"))
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            head = file.readline()
            file.seek(0)
            reader = csv.DictReader(
                file, delimiter=_delimiter(head), restkey=_TOO_LONG, restval=""
            )
            names = [name.strip().lower() for name in reader.fieldnames or ()]
            _check_columns(path, names)
            reader.fieldnames = names
            return [(reader.line_num, row) for row in reader]
    except (csv.Error, OSError) as error:
        raise InputError(Violation(file=str(path), rule=f"not a table: {error}")) from error


def _delimiter(head: str) -> str:
    return max(",;\t", key=head.count)


def _check_columns(path: Path, names: list[str]) -> None:
    if not any(names):
        raise InputError(Violation(file=str(path), rule="not a table: it has no line of names"))
    missing = [c for c in ("metric", "value") if c not in names]
    if missing:
        rule = f"a table of measured runs needs the columns {', '.join(missing)}"
        raise InputError(Violation(file=str(path), rule=rule))
    twice = sorted({n for n in names if n and names.count(n) > 1})
    if twice:
        rule = f"the columns {', '.join(twice)} come more than once"
        raise InputError(Violation(file=str(path), rule=rule))


def _text(cell: object) -> str:
    text = str(cell).strip() if isinstance(cell, str) else ""
    return "" if text.lower() in _EMPTY else text


def _group(row: Mapping[str, str]) -> tuple[str, ...]:
    """Returns what the rows of one configuration have in common, and others not."""
    prefix, _, last = row["id"].rpartition("-")
    if prefix and last == row["metric"]:
        return (prefix,)
    return (prefix, *(row[c] for c in COLUMNS if c not in _OF_A_VALUE))


def _configuration(rows: list[dict[str, str]]) -> Configuration:
    cells = {
        name: next((r[name] for r in rows if r[name]), "")
        for name in COLUMNS
        if name not in _OF_A_VALUE
    }
    prefix, _, last = rows[0]["id"].rpartition("-")
    metrics = [m for m in map(_metric, rows) if m is not None]
    notes = "; ".join(dict.fromkeys(r["notes"] for r in rows if r["notes"]))
    name = prefix if prefix and last == rows[0]["metric"] else rows[0]["id"]
    return Configuration(id=name, cells=cells, metrics=tuple(metrics), notes=notes)


def _metric(row: Mapping[str, str]) -> Metric | None:
    value = positive(row["value"])
    if value is None:
        return None
    found = in_si(metric_name(row["metric"]), value, row["unit"])
    if found is None or not math.isfinite(found[1]) or found[1] <= 0:
        return None
    return Metric(row_id=row["id"], name=found[0], value=found[1])


def _unread(row: Mapping[str, str]) -> str:
    """Returns why a row gave no value."""
    if positive(row["value"]) is None:
        return f"no positive number: {row['value']!r}"
    return f"{row['metric']} in {row['unit']!r}, a unit that says nothing of it"


def step_seconds(
    configuration: Configuration, tokens_per_step: float, sequences: float, gpus: float
) -> tuple[float, str] | None:
    """Returns (seconds of one step, the metric they follow from); None if none was measured.

    Args:
        tokens_per_step: sequences a step times their length.
        sequences: global batch size.
        gpus: processors of the run, for rates that count one of them.
    """
    work: dict[str, float] = {
        "tokens_per_s": tokens_per_step,
        "tokens_per_s_per_gpu": tokens_per_step / gpus,
        "samples_per_s": sequences,
        "samples_per_s_per_gpu": sequences / gpus,
    }
    for name in SPEEDS:
        value = configuration.value(name)
        if value is not None:
            return (value if name == "step_time" else work[name] / value), name
    return None


def has_speed(configuration: Configuration) -> bool:
    """Returns whether a step time follows from one of the configuration's metrics."""
    return any(m.name in SPEEDS for m in configuration.metrics)


def memory_by_definition(configuration: Configuration) -> dict[str, float]:
    """Returns bytes by what was measured.

    "allocated": the allocator's peak; "resident": what it holds between steps; "reserved":
    what it took from the driver; "smi": what the driver shows for the card; "callback": a
    submitter's own; "unknown" where nothing says.
    """
    found: dict[str, float] = {}
    for name in MEMORIES:
        value = configuration.value(name)
        if value is not None:
            found.setdefault(_definition(name, configuration), float(round(value)))
    return found


def _definition(metric: str, configuration: Configuration) -> str:
    if metric in {"alloc_bytes", "alloc_gib", "mem_first_gb"}:
        return "resident"
    if "reserved" in metric:
        return "reserved"
    if "alloc" in metric:
        return "allocated"
    said = configuration.notes.lower()
    where = f"{configuration.text('source')} {configuration.text('framework')}".lower()
    by_words = (
        ("nvidia-smi", "smi"), ("reserved", "reserved"), ("allocated", "allocated"),
    )  # fmt: skip
    for words, definition in by_words:
        if words in said:
            return definition
    if any(m.name.startswith("peak_alloc") for m in configuration.metrics):
        return "reserved"  # the allocator's own peak stands beside it
    by_place = (
        ("mlcommons", "callback"), ("mlperf", "callback"), ("torchtitan", "reserved"),
        ("interne", "smi"), ("megatron-bridge", "allocated"), ("megatron-core", "allocated"),
        ("torchtune", "allocated"),
    )  # fmt: skip
    return next((d for words, d in by_place if words in where), "unknown")


def same_words(notes: Iterable[str]) -> frozenset[str]:
    """Returns what notes say of a run itself: which release or publication it was left out."""
    about = re.compile(r"container|release|publication|published| set[ ,(]|^nemo \d|^linked")
    parts = (p.strip().lower() for text in notes for p in text.split(";"))
    return frozenset(p for p in parts if p and not about.search(p))
