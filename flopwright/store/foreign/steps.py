"""Steps of other programs' training logs: Megatron-LM, torchtitan, DeepSpeed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

from flopwright.errors import InputError, Violation
from flopwright.store.foreign.text import (
    CUT_SHORT,
    OPEN_END,
    broken,
    last_stamp,
    nothing_found,
    numbered_lines,
)

StepsKind = Literal["megatron", "torchtitan", "deepspeed"]
_NUMBER: Final = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf|-inf|NaN)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One line of a training log; None where the line does not say.

    Attributes:
        step_time_s: seconds a step (mean over the steps since the line before).
        tokens_per_s_per_gpu, sequences_per_s: of all ranks.
        flops_per_s_per_gpu: as the program counts them.
        at_s: when it was written, by the log's own clock, in seconds since 1970 (zone: UTC).
        line: number in the file.
    """

    step: int
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    sequences_per_s: float | None = None
    global_batch_size: int | None = None
    loss: float | None = None
    flops_per_s_per_gpu: float | None = None
    memory_bytes: int | None = None
    at_s: float | None = None
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsLog:
    """A training log's lines, in the order of their steps."""

    kind: StepsKind
    file: str
    lines: tuple[StepLine, ...]

    @property
    def ended_s(self) -> float | None:
        """When the last line with a date was written, in seconds since 1970."""
        return next((x.at_s for x in reversed(self.lines) if x.at_s is not None), None)


def read_steps(path: Path, kind: StepsKind) -> StepsLog:
    """Returns the steps of a log.

    Raises:
        InputError: it cannot be read, has no such line, a line is cut short or makes no
            sense, or its steps begin anew (two runs in one file).
    """
    parse, example = _PARSERS[kind]
    lines = tuple(parse(path))
    if not lines:
        raise nothing_found(path, kind, example)
    for before, after in pairwise(lines):
        if after.step <= before.step:
            raise broken(
                path,
                after.line,
                f"step {after.step} after step {before.step}: the log holds more than one run",
                "give each run a file of its own",
            )
    for line in lines:
        if line.step_time_s is not None and not 0 < line.step_time_s < float("inf"):
            raise broken(path, line.line, f"a step of {line.step_time_s:g} s makes no sense")
    return StepsLog(kind=kind, file=path.name, lines=lines)


_MEGATRON_START: Final = re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+)\s*\|")
_MEGATRON_TIME: Final = re.compile(rf"elapsed time per iteration \(ms\):\s*{_NUMBER}")
_MEGATRON_FLOPS: Final = re.compile(rf"throughput per GPU \(TFLOP/s/GPU\):\s*{_NUMBER}")
_MEGATRON_BATCH: Final = re.compile(r"glo?bal batch size:\s*(\d+)")
_MEGATRON_LOSS: Final = re.compile(rf"\|\s*(?:lm )?loss:\s*{_NUMBER}")
# Every line ends with it, whatever stands between.
_MEGATRON_END: Final = re.compile(r"number of nan iterations:\s*\d+\s*\|")


def _megatron(path: Path) -> Iterator[StepLine]:
    for number, line in numbered_lines(path):
        start = _MEGATRON_START.search(line)
        if start is None or "consumed samples" not in line:
            if start is not None and line.endswith(OPEN_END):
                raise broken(path, number, f"{CUT_SHORT}: no time stands behind the iteration")
            continue
        time = _MEGATRON_TIME.search(line)
        if time is None or _MEGATRON_END.search(line) is None:
            lacking = "elapsed time per iteration" if time is None else "number of nan iterations"
            raise broken(path, number, f"{CUT_SHORT}: it has no '{lacking}'")
        flops, batch, loss = (
            p.search(line) for p in (_MEGATRON_FLOPS, _MEGATRON_BATCH, _MEGATRON_LOSS)
        )
        yield StepLine(
            step=int(start[1]),
            step_time_s=float(time[1]) / 1e3,
            flops_per_s_per_gpu=float(flops[1]) * 1e12 if flops else None,
            global_batch_size=int(batch[1]) if batch else None,
            loss=float(loss[1]) if loss else None,
            at_s=last_stamp(line[: start.start()]),
            line=number,
        )


_TITAN_START: Final = re.compile(r"(?<!validate )\bstep:\s*(\d+)\b")
_TITAN: Final = re.compile(
    rf"\bstep:\s*(\d+)\s+loss:\s*{_NUMBER}\s+(?:grad_norm:\s*{_NUMBER}\s+)?"
    rf"memory:\s*{_NUMBER}GiB\({_NUMBER}%\)\s+tps:\s*([\d,]+)\s+tflops:\s*([\d,.]+)\s+"
    rf"mfu:\s*{_NUMBER}%"
)


def _torchtitan(path: Path) -> Iterator[StepLine]:
    for number, line in numbered_lines(path):
        if _TITAN_START.search(line) is None or "loss:" not in line:
            continue
        found = _TITAN.search(line)
        if found is None:
            raise broken(
                path, number, f"{CUT_SHORT}: it has not all of loss, memory, tps, tflops and mfu"
            )
        yield StepLine(
            step=int(found[1]),
            loss=float(found[2]),
            memory_bytes=round(float(found[4]) * 2**30),
            tokens_per_s_per_gpu=float(found[6].replace(",", "")),
            flops_per_s_per_gpu=float(found[7].replace(",", "")) * 1e12,
            at_s=last_stamp(line[: found.start()]),
            line=number,
        )


_DS_SPEED: Final = re.compile(
    rf"epoch=\d+/micro_step=\d+/global_step=(\d+), RunningAvgSamplesPerSec={_NUMBER}, "
    rf"CurrSamplesPerSec={_NUMBER}, MemAllocated={_NUMBER}GB, MaxMemAllocated={_NUMBER}GB"
)
_DS_PIPE: Final = re.compile(
    rf"\bsteps:\s*(\d+) loss:\s*{_NUMBER} .*?iter time \(s\):\s*{_NUMBER} samples/sec:\s*{_NUMBER}"
    rf"(?![\d.eE+-]|{OPEN_END})"
)


def _deepspeed(path: Path) -> Iterator[StepLine]:
    for number, line in numbered_lines(path):
        if "RunningAvgSamplesPerSec" in line or "/global_step=" in line:
            if " vm %" in line:
                continue
            found = _DS_SPEED.search(line)
            if found is None:
                raise broken(path, number, f"{CUT_SHORT}: it has no MaxMemAllocated")
            yield StepLine(
                step=int(found[1]),
                sequences_per_s=float(found[3]),
                memory_bytes=round(float(found[5]) * 2**30),
                at_s=last_stamp(line[: found.start()]),
                line=number,
            )
        elif re.search(r"\bsteps:\s*\d+ loss:", line):
            found = _DS_PIPE.search(line)
            if found is None:
                raise broken(path, number, f"{CUT_SHORT}: it has no samples/sec")
            yield StepLine(
                step=int(found[1]),
                loss=float(found[2]),
                step_time_s=float(found[3]),
                sequences_per_s=float(found[4]),
                at_s=last_stamp(line[: found.start()]),
                line=number,
            )


_PARSERS: Final[dict[StepsKind, tuple[Callable[[Path], Iterator[StepLine]], str]]] = {
    "megatron": (
        _megatron,
        "iteration 10/ 500 | consumed samples: ... | elapsed time per iteration (ms): 527.1 | ...",
    ),
    "torchtitan": (_torchtitan, "step: 10  loss: 7.1  grad_norm: 1.2  memory: ... tps: 4,123 ..."),
    "deepspeed": (
        _deepspeed,
        "epoch=0/micro_step=10/global_step=10, RunningAvgSamplesPerSec=..., ...",
    ),
}


def step_seconds(
    log: StepsLog, *, batch_sequences: int, tokens: float, gpus: int
) -> list[tuple[StepLine, float]]:
    """Returns each line with the seconds of a step.

    Args:
        batch_sequences, tokens: of one step of the plan; gpus: that it runs on.

    Raises:
        InputError: a line's batch is not the plan's, or a speed is 0.
    """
    out = []
    for line in log.lines:
        if line.global_batch_size is not None and line.global_batch_size != batch_sequences:
            raise InputError(
                Violation(
                    file=log.file,
                    line=line.line,
                    field="global batch size",
                    value=str(line.global_batch_size),
                    rule=f"the plan has {batch_sequences} sequences a step",
                    nearest_fix="give the plan of this run: flopwright import reads its settings",
                )
            )
        seconds = line.step_time_s
        if seconds is None and line.tokens_per_s_per_gpu:
            seconds = tokens / (line.tokens_per_s_per_gpu * gpus)
        elif seconds is None and line.sequences_per_s:
            seconds = batch_sequences / line.sequences_per_s
        if seconds is None:
            raise InputError(
                Violation(file=log.file, line=line.line, rule="a speed of 0 gives no step time")
            )
        out.append((line, seconds))
    return out
