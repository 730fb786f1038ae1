"""A measured run beside what calibrations predict for its plan, as far as it can be told."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flopwright.plan.file import PlanFile
from flopwright.report.compare import (
    ClassComparison,
    Comparison,
    compare,
    largest,
    memory_comparisons,
    tensors_by_stage,
)
from flopwright.report.compare_report import ComparedRun
from flopwright.report.findings import KernelRow, LinkRow, RankRow, ordered
from flopwright.report.metrics import Measurement, Prediction
from flopwright.report.trace import TraceEvent
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.calibration.repredict import (
    memory_as_routed,
    plan_of,
    predict_measurement,
)
from flopwright.simulator.comparison.kernel_suspects import comparable_kernels
from flopwright.simulator.comparison.parts import COMPUTE, Parts, predicted_parts
from flopwright.simulator.comparison.split import split_error
from flopwright.simulator.comparison.suspects import causes_of, predicted_link


def compared(
    calibration: Calibration, measurement: Measurement, trace: Sequence[TraceEvent] = ()
) -> Comparison:
    """Returns one calibration's prediction beside the measurement, what stands out, and why.

    Args:
        trace: all ranks' actions of one step, if they were kept.
    """
    plan = plan_of(measurement)
    prediction = predict_measurement(calibration, measurement)
    plain = compare(prediction, measurement)
    split = None
    if trace or measurement.metrics.time_s or any(r.time_s for r in measurement.ranks):
        split = split_error(
            plan.scenario, plan.parallel, calibration, prediction, measurement, trace
        )
    given = _as_routed(prediction, calibration, measurement)
    busy = _without_waiting(calibration)
    parts = predicted_parts(plan.scenario, plan.parallel, busy)
    findings = plain.findings
    if measurement.ranks:
        causes = causes_of(plan.scenario, plan.parallel, busy, given, measurement)
        metrics = measurement.metrics
        findings = ordered(causes, metrics.step_time_s, tensors_by_stage(metrics), split)
    worst = findings[0] if findings else largest(plain.time_classes, plain.memory_classes)
    return plain.model_copy(
        update={
            "findings": findings,
            "worst": worst,
            "routed_memory": _routed_memory(given, measurement),
            "split": split,
            "ranks": _rank_rows(parts, measurement),
            "links": _link_rows(plan, parts, measurement),
            "kernels": _kernel_rows(parts, measurement),
        }
    )


def _without_waiting(calibration: Calibration) -> Calibration:
    """Returns what ranks are busy for: factors without the waiting for each other in them.

    Busy seconds of a run have none either: waiting is nobody's work.
    """
    if not calibration.waiting_log:
        return calibration
    less = math.exp(-calibration.waiting_log)
    factors = {c: f * less for c, f in calibration.factors.items()}
    return calibration.model_copy(update={"factors": factors, "waiting_log": 0.0})


def _as_routed(
    prediction: Prediction, calibration: Calibration, measurement: Measurement
) -> Prediction:
    """Returns the prediction with the memory that the run's own routing makes of the plan.

    Bytes are held against that: which experts tokens chose is no fault of the memory's.
    """
    if not measurement.expert_rows:
        return prediction
    stages = memory_as_routed(calibration, measurement)
    metrics = prediction.metrics.model_copy(update={"memory_bytes": stages})
    return prediction.model_copy(update={"metrics": metrics})


def _routed_memory(given: Prediction, measurement: Measurement) -> tuple[ClassComparison, ...]:
    if not measurement.expert_rows:
        return ()
    return memory_comparisons(given.metrics.memory_bytes, measurement.metrics)


def compared_run(
    measurement: Measurement,
    before: Calibration | None,
    after: Calibration,
    trace: Sequence[TraceEvent] = (),
) -> ComparedRun:
    """Returns a measurement beside its predictions (`before` None: nothing to compare with)."""
    plan = plan_of(measurement)
    return ComparedRun(
        plan_name=measurement.plan_name,
        measurement_id=measurement.id,
        held_out=measurement.id not in after.measurements,
        plan=plan.parallel.label(),
        phase=phase_of(plan),
        stack_id=measurement.fingerprint.stack_id(),
        before=None if before is None else compare(
            predict_measurement(before, measurement), measurement
        ),
        after=compared(after, measurement, trace),
    )  # fmt: skip


def phase_of(plan: PlanFile) -> str:
    """Returns what part of a training a plan is for: "pretrain, 4,096 tokens"."""
    workload = plan.scenario.workload
    return f"{workload.kind}, {workload.seq_len:,} tokens"


def _rank_rows(parts: Parts, measurement: Measurement) -> tuple[RankRow, ...]:
    def split(time_s: dict[str, float]) -> tuple[float, float]:
        compute = sum(s for c, s in time_s.items() if c in COMPUTE)
        other = sum(s for c, s in time_s.items() if c.endswith("_comm"))
        return compute, other

    rows = []
    for rank in measurement.ranks:
        predicted = dict(parts.time_s[rank.stage])
        # Messages stand at their receiver in a run, and at no class of a stage here.
        predicted["pp_comm"] = sum(s for w, s in parts.messages_s.items() if w[1] == rank.stage)
        mine, theirs = split(predicted), split(rank.time_s)
        rows.append(
            RankRow(
                rank=rank.rank,
                stage=rank.stage,
                compute_predicted_s=mine[0],
                compute_measured_s=theirs[0],
                traffic_predicted_s=mine[1],
                traffic_measured_s=theirs[1],
            )
        )
    return tuple(rows)


def _link_rows(plan: PlanFile, parts: Parts, measurement: Measurement) -> tuple[LinkRow, ...]:
    return tuple(
        LinkRow(
            cls=link.cls,
            ranks=link.ranks,
            predicted_s=predicted_link(plan.parallel, parts, measurement, link),
            measured_s=link.seconds,
        )
        for link in measurement.links
    )


def _kernel_rows(parts: Parts, measurement: Measurement) -> tuple[KernelRow, ...]:
    seen = [r for r in measurement.ranks if r.kernel_s]
    foreseen = [comparable_kernels(parts.kernel_s[r.stage], r.kernel_s) for r in seen]
    names = dict.fromkeys(
        k for p, r in zip(foreseen, seen, strict=True) for k in [*p, *r.kernel_s]
    )
    return tuple(
        KernelRow(
            name=name,
            predicted_s=sum(p.get(name, 0.0) for p in foreseen) / len(seen),
            measured_s=sum(r.kernel_s.get(name, 0.0) for r in seen) / len(seen),
        )
        for name in names
    )
