"""verl's training log: a line a step with `timing_s/*`, brought to the phases of a round."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from flopwright.report.records import RoundSample
from flopwright.store.foreign.text import (
    CUT_SHORT,
    broken,
    nothing_found,
    numbered_lines,
    refuse_open_end,
)

# Timers that stand beside each other in a step; what is inside another one is left out.
_PHASE: Final = {
    "gen": "generation",
    "generate_sequences": "generation",
    "reward": "reward",
    "old_log_prob": "log_probs",
    "ref": "log_probs",
    "values": "log_probs",
    "update_actor": "update",
    "update_critic": "update",
    "update_weights": "weight_sync",
    "param_sync": "weight_sync",
    "sync_rollout_weights": "weight_sync",
}
_INSIDE: Final = frozenset({"generate_sequences"})
_START: Final = re.compile(r"(?:^|\s)step:(\d+) - ")
_PAIR: Final = re.compile(r"([A-Za-z][\w/@.\-]*):(-?[\d.]+(?:[eE][-+]?\d+)?|nan|inf)(?= - |$)")
_NUMPY: Final = re.compile(r"np\.(?:float|int)\d+\(([^)]*)\)")


def read_verl(path: Path) -> tuple[RoundSample, ...]:
    """Returns the log's steps as rounds.

    Raises:
        InputError: it cannot be read, has no such line, a line is cut short, or steps begin anew.
    """
    out: list[RoundSample] = []
    for number, line in numbered_lines(path):
        start = _START.search(line)
        if start is None:
            continue
        if "timing_s/step" in line:
            refuse_open_end(path, number, line)
        text = _NUMPY.sub(r"\1", line[start.end() :])
        figures = {k: float(v) for k, v in _PAIR.findall(text)}
        if "timing_s/step" not in figures:
            # a line of validation alone has no timers at all
            if "timing" not in text and text.count(":") == len(figures):
                continue
            raise broken(path, number, f"{CUT_SHORT}: it has no timing_s/step")
        if out and int(start[1]) <= out[-1].round:
            raise broken(
                path,
                number,
                f"step {start[1]} after step {out[-1].round}: the log holds more than one run",
                "give each run a file of its own",
            )
        out.append(_sample(int(start[1]), figures))
    if not out:
        raise nothing_found(path, "verl", "step:1 - ... - timing_s/gen:74.0 - timing_s/step:96.5")
    return tuple(out)


def _sample(step: int, figures: dict[str, float]) -> RoundSample:
    whole = figures["timing_s/step"]
    time_s: dict[str, float] = {}
    for name, phase in _PHASE.items():
        seconds = figures.get(f"timing_s/{name}")
        inside = name in _INSIDE and "timing_s/gen" in figures
        if seconds is not None and not inside:
            time_s[phase] = time_s.get(phase, 0.0) + seconds
    rest = whole - sum(time_s.values())
    if rest > 0:
        time_s["other"] = rest
    tokens = figures.get("perf/total_num_tokens")
    return RoundSample(
        round=step,
        round_time_s=whole,
        time_s=time_s,
        tokens_per_s=tokens / whole if tokens is not None and whole > 0 else None,
        figures={k: v for k, v in figures.items() if v == v and abs(v) != float("inf")},
    )
