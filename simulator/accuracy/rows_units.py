"""Numbers, units and names of metrics as tables write them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

# Throughputs that a step time follows from, the safest first.
SPEEDS: Final = ("step_time", "tokens_per_s", "tokens_per_s_per_gpu", "samples_per_s",
                 "samples_per_s_per_gpu")  # fmt: skip
# Metrics of the accelerator's memory. "alloc" stands for what the allocator gave out.
MEMORIES: Final = (
    "peak_mem_gb", "peak_mem_gib", "peak_mem_mib", "peak_mem_bytes",
    "peak_alloc_gb", "peak_alloc_gib", "peak_alloc_mib", "peak_alloc_bytes",
    "peak_reserved_gb", "peak_reserved_gib", "peak_reserved_mib", "peak_reserved_bytes",
    "alloc_bytes", "alloc_gib", "max_allocated_bytes", "max_reserved_bytes", "mem_first_gb",
)  # fmt: skip
_TIMES: Final[Mapping[str, float]] = {
    "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3,
    "milliseconds": 1e-3, "us": 1e-6, "min": 60.0, "mins": 60.0, "minute": 60.0, "minutes": 60.0,
    "h": 3600.0, "hr": 3600.0, "hrs": 3600.0, "hour": 3600.0, "hours": 3600.0, "d": 86400.0,
    "day": 86400.0, "days": 86400.0,
}  # fmt: skip
# Units are compared in lower case, but for byte units, whose case carries no meaning either.
_BYTES: Final[Mapping[str, float]] = {
    "bytes": 1.0, "byte": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
}  # fmt: skip
_MULTIPLES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_COUNTED: Final = {
    "token": "tokens", "tokens": "tokens", "tok": "tokens", "toks": "tokens",
    "sample": "samples", "samples": "samples", "seq": "samples", "seqs": "samples",
    "sequence": "samples", "sequences": "samples",
}  # fmt: skip
_ONE_GPU: Final = frozenset({"gpu", "device", "chip", "card", "accelerator", "rank"})
_STEP: Final = frozenset({"step", "iter", "iteration", "it", "batch", "steps"})
_ALIASES: Final = (
    (r"(avg|mean|median)_", ""), (r"(seconds?|secs?)(?=_|$)", "s"), (r"per_(device|chip|card)",
     "per_gpu"), (r"^(toks?|tokens?)_(s|per_s)", "tokens_per_s"), (r"^tokens_s", "tokens_per_s"),
    (r"_s_(gpu|device|chip|card)$", "_s_per_gpu"), (r"^tgs$", "tokens_per_s_per_gpu"),
    (r"^(samples|sequences|seqs?)_(per_)?s", "samples_per_s"),
    (r"^(iter(ation)?|step)_?(time|latency|duration)|^time_per_(step|iter(ation)?)$", "step_time"),
    (r"^step_time_s$", "step_time"), (r"^peak_memory", "peak_mem"),
)  # fmt: skip


def positive(text: str) -> float | None:
    """Returns the number that a text writes; None if it is none, not finite or not above 0.

    Thousands may be set apart; "~" before it, a spread ("+-") or a remark in brackets after it
    are dropped. A range or a bound is no number.
    """
    plain = re.sub(r"\([^)]*\)|\[[^\]]*\]", "", text.strip())
    plain = re.sub(r"^(~|≈|≃|ca\.?|about|approx\.?)\s*", "", plain.strip().lower())
    plain = re.split(r"±|\+/?-|\+-", plain, maxsplit=1)[0].strip().removesuffix("%")
    plain = re.sub(r"(?<=\d)[_' \u00a0\u202f](?=\d{3}(\D|$))", "", plain).replace(",", "")
    found = re.fullmatch(r"\+?(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)", plain.strip())
    if found is None:
        return None
    value = float(found[1])
    return value if math.isfinite(value) and value > 0 else None


def metric_name(text: str) -> str:
    """Returns a metric's name as the tables here write it."""
    name = re.sub(r"[\s/\-]+", "_", text.strip().lower())
    for pattern, plain in _ALIASES:
        name = re.sub(pattern, plain, name)
    return name


def in_si(metric: str, value: float, unit: str) -> tuple[str, float] | None:
    """Returns (metric, value in SI) of a value in a unit; None for a unit that is not its.

    A rate whose unit counts one GPU is one, whatever its metric is called; one whose unit counts
    none is what its metric says.
    """
    default = metric.rpartition("_")[2]
    if metric.startswith("step_time_"):  # "step_time_ms"
        metric, unit = "step_time", unit or default
    squeezed = re.sub(r"\s", "", unit.lower())
    if metric in MEMORIES:
        scale = _BYTES.get(squeezed or default)
        return None if scale is None else (metric, value * scale)
    if metric == "throughput" and squeezed:
        return _rate("tokens_per_s", squeezed, value) or _rate("samples_per_s", squeezed, value)
    if metric not in SPEEDS:
        return metric, value
    if metric == "step_time":
        return _time(squeezed or "s", value)
    return _rate(metric, squeezed, value)


def _time(unit: str, value: float) -> tuple[str, float] | None:
    if unit in ("it/s", "iter/s", "steps/s", "step/s", "iterations/s"):
        return "step_time", 1 / value
    time, _, per = unit.replace("per", "/").partition("/")
    scale = _TIMES.get(time)
    return None if scale is None or per not in ("", *_STEP) else ("step_time", value * scale)


def _rate(metric: str, unit: str, value: float) -> tuple[str, float] | None:
    counted = metric.split("_", 1)[0]
    if not unit:
        return metric, value
    parts = re.sub(r"per(?=[a-z])|·|\*", "/", unit).replace("(", "").replace(")", "").split("/")
    found = re.fullmatch(r"(k|m|b)?(tok(?:en)?s?|samples?|seq(?:uence)?s?)", parts[0])
    if unit in ("tgs", "tps"):
        parts, found = ["tokens", "s", *(["gpu"] if unit == "tgs" else [])], None
    elif found is None or _COUNTED[found[2]] != counted:
        return None
    rest = [p for p in parts[1:] if p]
    times = [p for p in rest if p in _TIMES]
    each = [p for p in rest if p in _ONE_GPU]
    if len(times) != 1 or len(times) + len(each) != len(rest):
        return None  # a rate of nodes or of something else
    scale = _MULTIPLES[(found[1] or "") if found else ""] / _TIMES[times[0]]
    name = metric if metric.endswith("_per_gpu") or not each else f"{metric}_per_gpu"
    return name, value * scale
