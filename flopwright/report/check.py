"""Is a run what its plan promised? Bounds for the first steps, and the verdict against them.

`python -m flopwright.report.check RUN check.json` reads the run's steps.jsonl (or a
measurement file) and ends with 0 (continue), 1 (look) or 2 (stop).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.report.metrics import Loss, Measurement
from flopwright.spec.base import Spec

Verdict = Literal["continue", "look", "stop"]
EXIT_CODES: Final[dict[Verdict, int]] = {"continue": 0, "look": 1, "stop": 2}
# Unreadable input is not a verdict on the run; 2 is taken by "stop".
EXIT_UNREADABLE: Final = 64
MAX_STEPS_FILE_BYTES: Final = 256 * 2**20


class CheckBounds(Spec):
    """check.json: what the first steps of a run may look like.

    Attributes:
        after_steps: steps a run needs before it is judged.
        discard_steps: first steps left out of the time (allocator, compilation, caches).
        step_time_low_s, step_time_high_s: the prediction's interval; outside it: look.
        step_time_stop_s: median step time above which the run is stopped.
        peak_memory_bytes: predicted peak of the fullest rank; above it by
            `memory_margin`: look. `memory_stop_bytes`: above it the next allocation may fail.
        loss_stop: nats a token; a loss above it after `after_steps` means it diverges:
            ln(vocabulary) is what guessing evenly costs.
    """

    schema_version: Literal[1] = 1
    plan_name: str
    after_steps: PositiveInt = 20
    discard_steps: NonNegativeInt = 3
    step_time_low_s: PositiveFloat
    step_time_expected_s: PositiveFloat
    step_time_high_s: PositiveFloat
    interval_probability: float = Field(default=0.8, gt=0, lt=1)
    step_time_stop_s: PositiveFloat
    peak_memory_bytes: NonNegativeInt
    memory_margin: float = Field(default=0.05, ge=0)
    memory_stop_bytes: PositiveInt
    loss_stop: PositiveFloat
    calibration_id: str | None = None


class Observed(Spec):
    """What a run has shown so far: all steps in order; memory where it was recorded."""

    step_time_s: tuple[float, ...]
    losses: tuple[Loss, ...]
    peak_memory_bytes: NonNegativeInt | None = None


class Finding(Spec):
    """One reason for a verdict, in words with values and units."""

    verdict: Verdict
    text: str


def judge(observed: Observed, bounds: CheckBounds) -> tuple[Verdict, tuple[Finding, ...]]:
    """Returns the worst verdict of all findings, and the findings."""
    findings = [*_loss(observed, bounds), *_memory(observed, bounds), *_time(observed, bounds)]
    order: tuple[Verdict, ...] = ("stop", "look", "continue")
    verdict = next(v for v in order if any(f.verdict == v for f in findings))
    return verdict, tuple(findings)


def _loss(observed: Observed, bounds: CheckBounds) -> list[Finding]:
    bad = next((i for i, loss in enumerate(observed.losses) if not math.isfinite(loss)), None)
    if bad is not None:
        return [Finding(verdict="stop", text=f"loss is not finite at step {bad + 1}")]
    if not observed.losses:
        return [Finding(verdict="look", text="no loss was recorded")]
    last = observed.losses[-1]
    what = f"loss {last:.4g} nats a token after {len(observed.losses)} steps"
    if len(observed.losses) >= bounds.after_steps and last > bounds.loss_stop:
        text = f"{what} is above {bounds.loss_stop:.4g}: worse than guessing evenly"
        return [Finding(verdict="stop", text=text)]
    return [Finding(verdict="continue", text=f"{what} (bound {bounds.loss_stop:.4g})")]


def _memory(observed: Observed, bounds: CheckBounds) -> list[Finding]:
    peak = observed.peak_memory_bytes
    if peak is None:
        return [Finding(verdict="continue", text="peak memory was not recorded: not judged")]
    expected = bounds.peak_memory_bytes
    what = f"peak memory {peak / 2**30:.3f} GiB, expected {expected / 2**30:.3f} GiB"
    if peak > bounds.memory_stop_bytes:
        text = f"{what}: above {bounds.memory_stop_bytes / 2**30:.3f} GiB an allocation may fail"
        return [Finding(verdict="stop", text=text)]
    if peak > expected * (1 + bounds.memory_margin):
        text = f"{what}: more than {bounds.memory_margin:.0%} above the prediction"
        return [Finding(verdict="look", text=text)]
    return [Finding(verdict="continue", text=what)]


def _time(observed: Observed, bounds: CheckBounds) -> list[Finding]:
    # A step in which memory was metered has a loss but no time: it counts as a step.
    steps = max(len(observed.step_time_s), len(observed.losses))
    kept = observed.step_time_s[bounds.discard_steps :]
    if steps < bounds.after_steps or not kept:
        text = f"{steps} steps so far; the step time is judged after {bounds.after_steps}"
        return [Finding(verdict="look", text=text)]
    value = median(kept)
    what = (
        f"median step time {value:.4g} s, expected {bounds.step_time_expected_s:.4g} s "
        f"[{bounds.step_time_low_s:.4g}, {bounds.step_time_high_s:.4g}] s at "
        f"{bounds.interval_probability:.0%}"
    )
    if value > bounds.step_time_stop_s:
        text = f"{what}: above the stop bound of {bounds.step_time_stop_s:.4g} s"
        return [Finding(verdict="stop", text=text)]
    if not bounds.step_time_low_s <= value <= bounds.step_time_high_s:
        side = "below" if value < bounds.step_time_low_s else "above"
        return [Finding(verdict="look", text=f"{what}: {side} the interval")]
    return [Finding(verdict="continue", text=what)]


def read_observed(path: Path, plan_name: str) -> Observed:
    """Returns what a run recorded.

    Args:
        path: a measurement (.json), a steps file (.jsonl), or a run's folder with steps.jsonl.
        plan_name: the steps of this plan are taken where a file holds several.

    Raises:
        InputError: no such file, or one that cannot be read.
    """
    if path.is_dir():
        path = path / "steps.jsonl"
    try:
        if path.stat().st_size > MAX_STEPS_FILE_BYTES:
            raise InputError(Violation(file=str(path), rule="the file is too large"))
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        rule = f"cannot read the run: {error.strerror}"
        raise InputError(Violation(file=str(path), rule=rule)) from error
    if path.suffix == ".json":
        return _from_measurement(text, path)
    return _from_steps(text, path, plan_name)


def _from_measurement(text: str, path: Path) -> Observed:
    try:
        measurement = Measurement.model_validate_json(text)
    except ValidationError as error:
        rule = f"not a measurement: {error.errors()[0]['msg']}"
        raise InputError(Violation(file=str(path), rule=rule)) from error
    warm_up = (measurement.metrics.step_time_s,) * measurement.discarded_steps
    return Observed(
        step_time_s=warm_up + measurement.step_time_samples_s,
        losses=measurement.losses,
        peak_memory_bytes=measurement.metrics.peak_memory_bytes or None,
    )


def _from_steps(text: str, path: Path, plan_name: str) -> Observed:
    rows = _of_plan(_rows(text, path), path, plan_name)
    _check_one_run(rows, path)
    peaks = [int(row["peak_memory_bytes"]) for row in rows if row.get("peak_memory_bytes")]
    return Observed(
        step_time_s=tuple(_numbers([r for r in rows if r.get("timed", True)], "step_time_s")),
        losses=tuple(_numbers(rows, "loss")),
        peak_memory_bytes=max(peaks) if peaks else _measured_peak(rows, path),
    )


def _rows(text: str, path: Path) -> list[dict[str, Any]]:
    rows = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # the run is writing it just now
                continue
            rule = f"not JSON: {error}"
            raise InputError(Violation(file=str(path), line=number, rule=rule)) from error
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _of_plan(rows: list[dict[str, Any]], path: Path, plan_name: str) -> list[dict[str, Any]]:
    """Returns the plan's rows; a file of one run is that run whatever its name."""
    names = {str(row.get("plan", plan_name)) for row in rows}
    if len(names) > 1 and plan_name not in names:
        rule = "the file holds several plans, none of this name"
        fix = did_you_mean(plan_name, names)
        raise InputError(
            Violation(file=str(path), value=repr(plan_name), rule=rule, nearest_fix=fix)
        )
    return [r for r in rows if len(names) == 1 or r.get("plan", plan_name) == plan_name]


def _check_one_run(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Refuses steps that begin anew: times and losses of two runs make one of neither."""
    steps = [row["step"] for row in rows if isinstance(row.get("step"), int)]
    for before, after in pairwise(steps):
        if after <= before:
            raise InputError(
                Violation(
                    file=str(path),
                    field="step",
                    value=f"{after} after {before}",
                    rule="the file holds more than one run",
                    nearest_fix="give each run a folder of its own",
                )
            )


def _measured_peak(rows: list[dict[str, Any]], path: Path) -> int | None:
    """Returns the peak from the measurement that stands beside the steps once a run has ended."""
    name = str(rows[-1].get("plan", "")) if rows else ""
    beside = path.parent / f"measurement-{name}.json"
    if "/" in name or not beside.is_file():
        return None
    return _from_measurement(beside.read_text(encoding="utf-8"), beside).peak_memory_bytes


def _numbers(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    # a strict JSON writer spells a loss that is not finite as null
    return [math.nan if row[key] is None else float(row[key]) for row in rows if key in row]


def main(argv: Sequence[str]) -> int:
    """Prints verdict and findings; returns 0 continue, 1 look, 2 stop, 64 unreadable input."""
    if len(argv) != 2:
        sys.stderr.write("usage: python -m flopwright.report.check RUN check.json\n")
        return EXIT_UNREADABLE
    try:
        bounds = CheckBounds.model_validate_json(Path(argv[1]).read_text(encoding="utf-8"))
        verdict, findings = judge(read_observed(Path(argv[0]), bounds.plan_name), bounds)
    except (InputError, OSError, TypeError, ValueError) as error:
        sys.stderr.write(f"check: {error}\n")
        return EXIT_UNREADABLE
    sys.stdout.write(f"{verdict.upper()}\n")
    for finding in findings:
        sys.stdout.write(f"  {finding.verdict:8} {finding.text}\n")
    return EXIT_CODES[verdict]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
