"""Logs of inference engines: vLLM's periodic summary, SGLang's batches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from flopwright.report.records import EngineLine
from flopwright.store.foreign.text import (
    CUT_SHORT,
    broken,
    nothing_found,
    numbered_lines,
    refuse_open_end,
    when,
)

EngineKind = Literal["vllm", "sglang"]

_VLLM: Final = re.compile(
    r"Avg prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: ([\d.]+) tokens/s, "
    r"Running: (\d+) reqs,(?: Swapped: \d+ reqs,)? (?:Waiting|Pending): (\d+) reqs"
    r"(?:, .*?(?:GPU )?KV cache usage: ([\d.]+)%)?"
    r"(?:, .*?Prefix cache hit rate: ([\d.]+)%)?"
)
_VLLM_TIME: Final = re.compile(r"(\d\d-\d\d \d\d:\d\d:\d\d)")
_SPEC: Final = re.compile(r"SpecDecoding metrics: .*?Mean acceptance length: ([\d.]+)")
_SGLANG_TIME: Final = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\]")


@dataclass(frozen=True, slots=True)
class EngineLog:
    """What an engine logged, in the order of the file.

    Attributes:
        ended_s: when the last line was written, in seconds since 1970 (zone: UTC); None where
            lines have no date, or one without a year.
    """

    kind: EngineKind
    lines: tuple[EngineLine, ...]
    ended_s: float | None = None


def read_engine_log(path: Path, kind: EngineKind) -> EngineLog:
    """Returns the lines of an engine's log that say how it decodes and prefills.

    Raises:
        InputError: it cannot be read, has no such line, or one is cut short.
    """
    found = _vllm(path) if kind == "vllm" else _sglang(path)
    if not found:
        example = (
            "Engine 000: Avg prompt throughput: ... tokens/s, Avg generation throughput: ..."
            if kind == "vllm"
            else "Decode batch, #running-req: 8, #token: 1024, token usage: 0.01, ..."
        )
        raise nothing_found(path, kind, example)
    first = next((t for t, _ in found if t is not None), None)
    lines = tuple(
        line if t is None or first is None else line.model_copy(update={"time_s": t - first})
        for t, line in found
    )
    last = next((t for t, _ in reversed(found) if t is not None), None)
    return EngineLog(kind, lines, last if kind == "sglang" else None)


_Found = list[tuple[float | None, EngineLine]]


def _vllm(path: Path) -> _Found:
    out: _Found = []
    for number, line in numbered_lines(path):
        if "metrics" in line or "throughput" in line:
            refuse_open_end(path, number, line)
        spec = _SPEC.search(line)
        if spec is not None and out:
            at, before = out[-1]
            out[-1] = (at, before.model_copy(update={"accept_length": float(spec[1])}))
        if "Avg prompt throughput" not in line:
            continue
        found = _VLLM.search(line)
        if found is None or found[5] is None:
            raise broken(
                path, number, f"{CUT_SHORT}: it has not all of throughputs, requests, cache usage"
            )
        stamp = _VLLM_TIME.search(line)
        # the stamp has no year; 2000 has a 29th of February
        at = when(f"2000-{stamp[1]}", "%Y-%m-%d %H:%M:%S") if stamp else None
        out.append(
            (
                at,
                EngineLine(
                    phase="mixed",
                    prompt_tokens_per_s=float(found[1]),
                    generated_tokens_per_s=float(found[2]),
                    running=int(found[3]),
                    waiting=int(found[4]),
                    kv_usage=float(found[5]) / 100,
                    prefix_hit_rate=float(found[6]) / 100 if found[6] else None,
                    line=number,
                ),
            )
        )
    return out


def _sglang(path: Path) -> _Found:
    out: _Found = []
    for number, line in numbered_lines(path):
        for phase in ("Decode", "Prefill"):
            begin = line.find(f"{phase} batch")
            if begin >= 0:
                refuse_open_end(path, number, line)
                stamps = _SGLANG_TIME.findall(line[:begin])
                at = when(stamps[-1]) if stamps else None
                out.append((at, _sglang_line(path, number, line[begin:])))
    return out


def _sglang_line(path: Path, number: int, text: str) -> EngineLine:
    decode = text.startswith("Decode")
    running = _value(text, "#running-req")
    if running is None or (decode and _value(text, "gen throughput (token/s)") is None):
        lacking = "#running-req" if running is None else "gen throughput (token/s)"
        raise broken(path, number, f"{CUT_SHORT}: it has no '{lacking}'")
    if not decode and _value(text, "#new-token") is None:
        raise broken(path, number, f"{CUT_SHORT}: it has no '#new-token'")
    # Engines with several caches print one usage each: the fullest binds.
    usages = [float(x) for x in re.findall(r"usage: ([\d.]+)", text)]
    graph = re.search(r"(?:cuda|npu) graph: (True|False)", text)
    return EngineLine(
        phase="decode" if decode else "prefill",
        running=int(running),
        waiting=int(_value(text, "#queue-req") or 0),
        generated_tokens_per_s=_value(text, "gen throughput (token/s)"),
        prompt_tokens_per_s=_value(text, "input throughput (token/s)"),
        context_tokens=_whole(_value(text, "#token") or _value(text, "#full token")),
        kv_usage=max(usages) if usages else None,
        new_tokens=_whole(_value(text, "#new-token")),
        cached_tokens=_whole(_value(text, "#cached-token")),
        cuda_graph=graph[1] == "True" if graph else None,
        accept_length=_value(text, "accept len"),
        line=number,
    )


def _value(text: str, name: str) -> float | None:
    found = re.search(rf"(?<![\w-]){re.escape(name)}: ([\d.]+)", text)
    return float(found[1]) if found else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
