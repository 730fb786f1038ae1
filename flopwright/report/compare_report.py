"""Many runs compared at once, before and after a calibration, with the summary numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Final, Literal

from flopwright.report.compare import Comparison
from flopwright.report.drift import PlanDrift
from flopwright.spec.base import Spec

GroupKey = Literal["plan", "phase", "stack"]
_FIELDS: Final[dict[GroupKey, str]] = {"plan": "plan", "phase": "phase", "stack": "stack_id"}


class ComparedRun(Spec):
    """One measurement with its predictions.

    Attributes:
        held_out: the calibration behind `after` did not learn from this measurement.
        plan, phase, stack_id: what runs are grouped by beside their name: the split in short,
            the part of a training, hardware and software.
        before: None where no calibration to compare with was named.
    """

    plan_name: str
    measurement_id: str
    held_out: bool
    plan: str = ""
    phase: str = ""
    stack_id: str = ""
    before: Comparison | None = None
    after: Comparison

    def routing_text(self) -> str:
        """Returns what uneven routing did to the memory, "" where it was even or not counted."""
        routed, plain = self.after.routed_memory, self.after.memory_classes
        if not routed:
            return ""
        even, given = (sum(c.share for c in classes) for classes in (plain, routed))
        return (
            f"memory of {self.plan_name}: {even:+.1%} as predicted with even routing, "
            f"{given:+.1%} given the rows that its experts got"
        )


class ErrorSummary(Spec):
    """Errors over a set of runs, as fractions.

    Attributes:
        median_error, max_error: of |signed error| of the step time.
        max_memory_error: of |signed error| of tensor memory; None where none was measured.
        inside_interval: share of measured step times inside the predicted interval.
    """

    runs: int
    median_error: float
    max_error: float
    max_memory_error: float | None = None
    inside_interval: float


class ComparisonReport(Spec):
    """What `flopwright compare` writes.

    Attributes:
        fitted, held_out: summaries of `after` over runs learnt from and the others.
        noise_floor: the largest noise floor of the runs; errors below it say nothing.
        drifts: plans measured often enough to say whether they have become slower.
    """

    kind: Literal["comparison_report"] = "comparison_report"
    before_calibration: str | None = None
    after_calibration: str | None = None
    runs: tuple[ComparedRun, ...]
    before: ErrorSummary | None = None
    after: ErrorSummary | None = None
    fitted: ErrorSummary | None = None
    held_out: ErrorSummary | None = None
    noise_floor: float | None = None
    drifts: tuple[PlanDrift, ...] = ()


def summarise(comparisons: Iterable[Comparison]) -> ErrorSummary | None:
    """Returns the summary of some comparisons, or None of none."""
    found = tuple(comparisons)
    errors = [abs(e) for c in found if (e := c.error("step_time_s")) is not None]
    if not errors:
        return None
    memory = [abs(e) for c in found if (e := c.error("tensor_memory_bytes")) is not None]
    inside = [m.in_interval for c in found for m in c.metrics if m.in_interval is not None]
    return ErrorSummary(
        runs=len(found),
        median_error=statistics.median(errors),
        max_error=max(errors),
        max_memory_error=max(memory, default=None),
        inside_interval=sum(inside) / len(inside) if inside else 0.0,
    )


def make_report(runs: Iterable[ComparedRun], drifts: Iterable[PlanDrift] = ()) -> ComparisonReport:
    """Returns the report over compared runs, in the order given."""
    found = tuple(runs)
    before = [r.before for r in found if r.before is not None]
    floors = [r.after.noise_floor for r in found if r.after.noise_floor is not None]
    return ComparisonReport(
        before_calibration=before[0].calibration_id if before else None,
        after_calibration=found[0].after.calibration_id if found else None,
        runs=found,
        before=summarise(before),
        after=summarise(r.after for r in found),
        fitted=summarise(r.after for r in found if not r.held_out),
        held_out=summarise(r.after for r in found if r.held_out),
        noise_floor=max(floors, default=None),
        drifts=tuple(drifts),
    )


def by_group(report: ComparisonReport, key: GroupKey) -> dict[str, ErrorSummary]:
    """Returns a summary of `after` by plan, phase or stack, in the order of the runs."""
    groups: dict[str, list[Comparison]] = {}
    for run in report.runs:
        groups.setdefault(str(getattr(run, _FIELDS[key])), []).append(run.after)
    found = {name: summarise(members) for name, members in groups.items()}
    return {name: summary for name, summary in found.items() if summary is not None}
