"""Published measurements as configurations: which rows belong together, and what they measure.

A file holds one metric a row. Rows of one configuration share their id up to the last "-"
where that names the metric; elsewhere they share every column that describes a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import pandas as pd

from flopwright.errors import InputError, Violation

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

# Seconds, tokens, samples or bytes in one of a unit. Units are compared in lower case, but for
# byte units, whose case carries no meaning either.
_UNITS: Final[Mapping[str, float]] = {
    "s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0,
    "tokens/s": 1.0, "tokens/s/gpu": 1.0, "samples/s": 1.0, "sequences/s": 1.0,
    "ktokens/s": 1e3, "ktokens/s/gpu": 1e3, "mtokens/s": 1e6,
    "bytes": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
}  # fmt: skip
_DEFAULT_UNIT: Final = {
    "step_time": "s", "tokens_per_s": "tokens/s", "tokens_per_s_per_gpu": "tokens/s/GPU",
    "samples_per_s": "samples/s",
}  # fmt: skip
# Throughputs that a step time follows from, the safest first.
SPEEDS: Final = ("step_time", "tokens_per_s", "tokens_per_s_per_gpu", "samples_per_s")
# Metrics of the accelerator's memory. "alloc" stands for what the allocator gave out.
MEMORIES: Final = (
    "peak_mem_gb", "peak_mem_gib", "peak_mem_mib", "peak_mem_bytes",
    "peak_alloc_gb", "peak_alloc_gib", "peak_alloc_mib", "peak_alloc_bytes",
    "peak_reserved_gb", "peak_reserved_gib", "peak_reserved_mib", "peak_reserved_bytes",
    "alloc_bytes", "alloc_gib", "max_allocated_bytes", "max_reserved_bytes", "mem_first_gb",
)  # fmt: skip


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
        return positive(self.text(column))

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


def positive(text: str) -> float | None:
    """Returns the number that a text writes; None if it is none, not finite or not above 0."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def read_configurations(
    path: Path,
) -> tuple[tuple[Configuration, ...], tuple[tuple[str, str], ...]]:
    """Returns the configurations of a file, and the rows that hold no value, with the reason.

    Raises:
        InputError: no file there, or not one of measured runs.
    """
    frame = _frame(path)
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    repeats: dict[tuple[str, ...], int] = {}
    skipped: list[tuple[str, str]] = []
    for number, record in enumerate(frame.to_dict("records"), start=2):
        row = {name: _text(record.get(name)) for name in COLUMNS}
        row["id"] = row["id"] or f"line {number}"
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
        else:
            skipped.extend((r["id"], "no positive number in a known unit") for r in rows)
    return tuple(found), tuple(skipped)


def _frame(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise InputError(Violation(file=str(path), rule="no such file"))
    try:
        frame = pd.read_csv(
            path, dtype=str, keep_default_na=False, on_bad_lines="skip", encoding_errors="replace"
        )
    except (ValueError, OSError) as error:
        raise InputError(Violation(file=str(path), rule=f"not a table: {error}")) from error
    frame.columns = [str(c).strip().lower() for c in frame.columns]
    missing = [c for c in ("metric", "value") if c not in frame.columns]
    if missing:
        rule = f"a table of measured runs needs the columns {', '.join(missing)}"
        raise InputError(Violation(file=str(path), rule=rule))
    return frame.loc[:, ~frame.columns.duplicated()]


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
    name = row["metric"].lower()
    if value is None:
        return None
    if name in SPEEDS or name in MEMORIES:
        unit = row["unit"] or _DEFAULT_UNIT.get(name, name.rpartition("_")[2])
        scale = _UNITS.get(re.sub(r"\s", "", unit.lower()).replace("tok/", "tokens/"))
        if scale is None:
            return None
        value *= scale
    return Metric(row_id=row["id"], name=name, value=value) if math.isfinite(value) else None


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
