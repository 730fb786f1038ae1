"""Traces of PyTorch's profiler (Kineto, Chrome JSON): what kernels and traffic took, by class."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flopwright.errors import InputError, Violation

MAX_BYTES: Final = 2**31
_BLOCK_BYTES: Final = 2**16
_NEVER_NS: Final = 2**63
_STEP: Final = re.compile(r"ProfilerStep#(\d+)")
# First match wins; names of kernels (GPU) and of operators (CPU).
_CLASSES: Final = tuple(
    (re.compile(pattern, re.IGNORECASE), name)
    for pattern, name in (
        (r"nccl|gloo:|rccl|c10d::|allreduce_|reduce_scatter_|allgather_|alltoall_", "comm"),
        (r"memcpy|aten::_to_copy_host|HtoD|DtoH", "copy"),
        (r"(flash|fmha|attention|sdpa|cudnn.*mha).*(bwd|backward|dq|dkdv)|(bwd|backward).*"
         r"(flash|fmha|attention|sdpa)", "attention_backward"),
        (r"flash|fmha|attention|sdpa|cudnn.*mha", "attention"),
        (r"multi_tensor_apply|adam|muon|_foreach|lamb", "optimizer"),
        (r"group(ed)?_?(gemm|mm)|grouped_mm|moe.*gemm|m_grouped", "grouped_gemm"),
        (r"gemm|cutlass|cublas|nvjet|xmma|wgmma|Cijk_|aten::(mm|addmm|bmm|baddbmm|linear|matmul|"
         r"_scaled_mm|einsum|mkldnn_linear|addbmm)\b|mkl_|onednn", "gemm"),
        (r"quant|cast.*(fp8|e4m3|mxfp)|fp8.*cast", "quantize"),
    )
)  # fmt: skip
# Whatever runs inside these is theirs.
_INSIDE: Final = frozenset(
    {"optimizer", "attention", "attention_backward", "comm", "grouped_gemm", "quantize"}
)
_COMPUTE_CATS: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoTrace:
    """One rank's profiled steps.

    Attributes:
        steps_s: seconds of each profiled step ("ProfilerStep#"); the whole trace where none is
            marked.
        ended_s: when the last event ended, in seconds since 1970; None in traces of profilers
            that did not write when theirs began.
        kernel_s: seconds a step by kernel class; comm_s: by collective ("all_reduce").
        groups_s: seconds a step by the ranks that a collective ran among, where the trace says.
    """

    rank: int
    world_size: int
    device: str
    steps_s: tuple[float, ...]
    kernel_s: dict[str, float]
    comm_s: dict[str, float]
    groups_s: dict[tuple[int, ...], dict[str, float]]
    ended_s: float | None = None


def read_kineto(path: Path) -> KinetoTrace:
    """Returns what a trace holds, gzipped or not.

    Raises:
        InputError: it cannot be read, is cut short, or is no trace of the profiler.
    """
    data = _load(path)
    events = [e for e in data.get("traceEvents", ()) if isinstance(e, dict)]
    done = [e for e in events if e.get("ph") == "X" and "dur" in e]
    if not done:
        raise InputError(
            Violation(
                file=str(path),
                field="traceEvents",
                rule="holds no finished event: not a trace of PyTorch's profiler",
                nearest_fix="write it with prof.export_chrome_trace(FILE)",
            )
        )
    _check_times(done, path)
    about = data.get("distributedInfo") or {}
    gpu = [e for e in done if e.get("cat") in _COMPUTE_CATS]
    steps = _steps(done)
    seconds = _by_kernel(gpu) if gpu else _by_operator(done)
    count = max(len(steps), 1)
    kernel_s = {k: s / count for k, s in seconds.items() if k != "comm"}
    collectives = [e for e in (gpu or done) if _class_of(str(e.get("name"))) == "comm"]
    return KinetoTrace(
        rank=int(about.get("rank", 0)),
        world_size=int(about.get("world_size", 1)),
        device="gpu" if gpu else "cpu",
        steps_s=steps or (_length(done),),
        kernel_s=kernel_s,
        comm_s=_by_collective(collectives, count),
        groups_s=_by_group(collectives, count),
        ended_s=_ended_s(data, done),
    )


def _ended_s(data: dict[str, Any], done: Sequence[dict[str, Any]]) -> float | None:
    """Returns when a trace ended; events' times count from its base."""
    base = data.get("baseTimeNanoseconds")
    if not isinstance(base, int | float) or not 0 < base < _NEVER_NS:
        return None
    return base * 1e-9 + max(float(e["ts"]) + float(e["dur"]) for e in done) * 1e-6


def _check_times(events: Sequence[dict[str, Any]], path: Path) -> None:
    """Refuses a trace with an event that began at no time or took less than none."""
    for event in events:
        try:
            began, took = float(event["ts"]), float(event["dur"])
        except (KeyError, TypeError, ValueError):
            began = took = math.nan
        if not (math.isfinite(began) and math.isfinite(took) and took >= 0):
            raise InputError(
                Violation(
                    file=str(path),
                    field=f"event '{event.get('name', '')}'",
                    value=f"ts {event.get('ts')}, dur {event.get('dur')}",
                    rule="began at no time, or took less than none: the clock jumped, or the "
                    "file was changed",
                    nearest_fix="profile another step",
                )
            )


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(Violation(file=str(path), rule="the trace is too large"))
        with path.open("rb") as file:
            head = file.read(_BLOCK_BYTES)
            packed = head[:2] == b"\x1f\x8b"
            if b"\0" in head and not packed:
                raise InputError(Violation(file=str(path), rule="is no JSON text"))
            raw = head + file.read()
        if packed:
            raw = gzip.decompress(raw)
        data = json.loads(raw)
    except OSError as error:
        what = error.strerror or "the gzip stream is broken"
        raise InputError(Violation(file=str(path), rule=f"cannot be read: {what}")) from error
    except EOFError as error:
        raise InputError(_cut(path, 1, "the gzip stream ends early")) from error
    except UnicodeDecodeError as error:
        raise InputError(Violation(file=str(path), rule="is no JSON text")) from error
    except json.JSONDecodeError as error:
        raise InputError(_cut(path, error.lineno, error.msg)) from error
    if not isinstance(data, dict):
        data = {"traceEvents": data}
    return data


def _cut(path: Path, line: int, what: str) -> Violation:
    return Violation(
        file=str(path),
        line=line,
        rule=f"the trace is cut short or broken: {what}",
        nearest_fix="export it again; the profiler writes the file when the step has ended",
    )


def _steps(events: Iterable[dict[str, Any]]) -> tuple[float, ...]:
    """Returns the marked steps in order; a step is marked on the host, and maybe on the GPU."""
    found: dict[int, float] = {}
    for event in events:
        match = _STEP.match(str(event.get("name")))
        if match:
            number = int(match[1])
            found[number] = max(found.get(number, 0.0), float(event["dur"]) * 1e-6)
    return tuple(found[number] for number in sorted(found))


def _length(events: Sequence[dict[str, Any]]) -> float:
    begin = min(float(e["ts"]) for e in events)
    return (max(float(e["ts"]) + float(e["dur"]) for e in events) - begin) * 1e-6


def _class_of(name: str) -> str:
    # autograd's wrapper of a forward is named so too; a backward's ends with "Backward"
    name = name.replace("GeneratedBackwardFor_", "")
    return next((kind for pattern, kind in _CLASSES if pattern.search(name)), "memory_bound")


def _by_kernel(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    out: dict[str, float] = {}
    for event in events:
        kind = _class_of(str(event.get("name")))
        if event.get("cat") != "kernel":
            kind = "copy"
        out[kind] = out.get(kind, 0.0) + float(event["dur"]) * 1e-6
    return out


def _by_operator(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns seconds by class of operators on a CPU: each its own, without those inside it.

    An operator that is no class of its own ("aten::copy_" of a product's) is memory bound; all
    inside an optimizer's step is the optimizer.
    """
    threads: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for event in events:
        name = str(event.get("name"))
        operator = event.get("cat") == "cpu_op"
        if operator or name.startswith("Optimizer.step"):
            threads.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    out: dict[str, float] = {}
    for mine in threads.values():
        mine.sort(key=lambda e: (float(e["ts"]), -float(e["dur"])))
        _add_own_times(mine, out)
    return out


def _add_own_times(events: Sequence[dict[str, Any]], out: dict[str, float]) -> None:
    stack: list[tuple[float, str, list[float]]] = []  # (end, class, [own seconds])
    for event in events:
        begin, dur = float(event["ts"]), float(event["dur"])
        while stack and begin >= stack[-1][0]:
            _, kind, own = stack.pop()
            out[kind] = out.get(kind, 0.0) + max(0.0, own[0])
        inherited = stack[-1][1] if stack else ""
        name = str(event.get("name"))
        kind = "optimizer" if name.startswith("Optimizer.step") else _class_of(name)
        if inherited in _INSIDE:
            kind = inherited
        if stack:
            stack[-1][2][0] -= dur * 1e-6
        stack.append((begin + dur, kind, [dur * 1e-6]))
    for _, kind, own in stack:
        out[kind] = out.get(kind, 0.0) + max(0.0, own[0])


_COLLECTIVES: Final = (
    (re.compile(r"reduce_?scatter", re.IGNORECASE), "reduce_scatter"),
    (re.compile(r"all_?gather", re.IGNORECASE), "all_gather"),
    (re.compile(r"all_?reduce", re.IGNORECASE), "all_reduce"),
    (re.compile(r"all_?to_?all", re.IGNORECASE), "all_to_all"),
    (re.compile(r"broadcast", re.IGNORECASE), "broadcast"),
    (re.compile(r"send|recv", re.IGNORECASE), "send_recv"),
)


def _by_collective(events: Iterable[dict[str, Any]], count: int) -> dict[str, float]:
    out: dict[str, float] = {}
    for event in events:
        kind = _collective(event)
        out[kind] = out.get(kind, 0.0) + float(event["dur"]) * 1e-6 / count
    return out


def _collective(event: dict[str, Any]) -> str:
    name = f"{(event.get('args') or {}).get('Collective name', '')} {event.get('name')}"
    return next((kind for pattern, kind in _COLLECTIVES if pattern.search(name)), "other")


def _by_group(
    events: Iterable[dict[str, Any]], count: int
) -> dict[tuple[int, ...], dict[str, float]]:
    out: dict[tuple[int, ...], dict[str, float]] = {}
    for event in events:
        ranks = (event.get("args") or {}).get("Process Group Ranks")
        members = tuple(int(x) for x in re.findall(r"\d+", str(ranks))) if ranks else ()
        if not members or "..." in str(ranks):
            continue
        mine = out.setdefault(members, {})
        kind = _collective(event)
        mine[kind] = mine.get(kind, 0.0) + float(event["dur"]) * 1e-6 / count
    return out
