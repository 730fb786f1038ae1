"""Predicted against measured, field by field, and where to look first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from flopwright.report.causes import (
    Cause,
    Seen,
    class_suspects,
    memory_seen,
    name_causes,
    time_sigma,
)
from flopwright.report.findings import (
    ErrorSplit,
    Finding,
    KernelRow,
    LinkRow,
    RankRow,
    class_finding,
    ordered,
)
from flopwright.report.metrics import (
    MEMORY_CLASSES,
    TIME_CLASSES,
    Interval,
    Measurement,
    Prediction,
    Provenance,
    StepMetrics,
)
from flopwright.spec.base import Spec

Unit = Literal["s", "tokens/s", "FLOP/s", "bytes", "fraction"]


class MetricComparison(Spec):
    """One number, predicted and measured, both in `unit`.

    Attributes:
        signed_error: (predicted - measured) / measured, so that +0.1 is 10 % too high;
            None where nothing was measured.
        in_interval: whether the measured value lies in the predicted interval; None where
            no interval was predicted.
    """

    metric: str
    unit: Unit
    predicted: float
    measured: float
    signed_error: float | None = None
    in_interval: bool | None = None


class ClassComparison(Spec):
    """One time or memory class, in s or bytes.

    Attributes:
        share: (predicted - measured) / measured whole (step time, or tensor bytes of the
            fullest stage): what the class adds to the error of the whole.
    """

    name: str
    predicted: float
    measured: float
    share: float


class Comparison(Spec):
    """A prediction beside the measurement of the same plan.

    Attributes:
        time_classes: their shares sum to the signed error of step_time_s.
        memory_classes: of the fullest stage; "reserved" left out, which only the
            measurement's allocator knows.
        routed_memory: the same, predicted from the rows that experts got in the run; empty
            where they were even, or not counted.
        worst: what to look at first; None where neither side has classes.
        findings: all that stands out of the noise, the largest effect first.
        split: cost and structure error of the step time; None where nobody replayed it.
        ranks, links, kernels: who took how long, where the run told them apart.
        noise_floor: how far one plan measured twice in the same launch differed.
    """

    kind: Literal["comparison"] = "comparison"
    plan_name: str
    measurement_id: str
    calibration_id: str | None = None
    provenance: Provenance
    interval: Interval
    metrics: tuple[MetricComparison, ...]
    time_classes: tuple[ClassComparison, ...]
    memory_classes: tuple[ClassComparison, ...]
    routed_memory: tuple[ClassComparison, ...] = ()
    worst: Finding | None = None
    findings: tuple[Finding, ...] = ()
    split: ErrorSplit | None = None
    ranks: tuple[RankRow, ...] = ()
    links: tuple[LinkRow, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    noise_floor: float | None = None

    def error(self, metric: str) -> float | None:
        """Returns the signed error of a metric as a fraction; None where it is not known."""
        return next((m.signed_error for m in self.metrics if m.metric == metric), None)


def signed_error(predicted: float, measured: float) -> float | None:
    """Returns (predicted - measured) / measured, or None where nothing was measured."""
    return (predicted - measured) / measured if measured else None


def compare(prediction: Prediction, measurement: Measurement) -> Comparison:
    """Returns the comparison of a prediction with the measurement of the same plan.

    What stands out is looked for in time and memory classes alone; `simulator.comparison`
    also looks at ranks, links and kernels, and splits the error in two.
    """
    measured = measurement.metrics
    prediction = _as_counted(prediction, measured)
    predicted = prediction.metrics
    time_classes = (
        _classes(predicted.time_s, measured.time_s, TIME_CLASSES, whole=measured.step_time_s)
        if measured.time_s
        else ()  # only the whole step was timed
    )
    tensor_bytes = measured.tensor_memory_bytes()
    memory_classes = memory_comparisons(predicted.memory_bytes, measured)
    causes = class_causes(predicted, measured, measurement.noise_floor or 0.0)
    findings = ordered(causes, measured.step_time_s, [tensor_bytes], None)
    return Comparison(
        plan_name=measurement.plan_name,
        measurement_id=measurement.id,
        calibration_id=prediction.calibration_id,
        provenance=prediction.provenance,
        interval=prediction.step_time_interval,
        metrics=_metrics(prediction, measured),
        time_classes=time_classes,
        memory_classes=memory_classes,
        worst=findings[0] if findings else largest(time_classes, memory_classes),
        findings=findings,
        noise_floor=measurement.noise_floor,
    )


def memory_comparisons(
    predicted: Sequence[Mapping[str, int]], measured: StepMetrics
) -> tuple[ClassComparison, ...]:
    """Returns the memory classes of the stage that is measured fullest; () of no measured one.

    Args:
        predicted: bytes by class of each stage; classes that were not counted are left out.
    """
    whole = measured.tensor_memory_bytes()
    if not whole:
        return ()
    counted = {name for stage in measured.memory_bytes for name in stage}
    stages = [{k: v for k, v in stage.items() if k in counted} for stage in predicted]
    return _classes(
        _fullest_stage(stages, measured.memory_bytes),
        _fullest_stage(measured.memory_bytes, measured.memory_bytes),
        MEMORY_CLASSES,
        whole=whole,
    )


def _as_counted(prediction: Prediction, measured: StepMetrics) -> Prediction:
    """Returns the prediction without memory classes that the measurement could not count.

    An executor on CPUs meters no temporaries: leaving them in would compare two different sums.
    """
    counted = {name for stage in measured.memory_bytes for name in stage}
    stages = tuple(
        {k: v for k, v in stage.items() if k in counted}
        for stage in prediction.metrics.memory_bytes
    )
    metrics = prediction.metrics.model_copy(update={"memory_bytes": stages})
    return prediction.model_copy(update={"metrics": metrics})


def _metrics(prediction: Prediction, measured: StepMetrics) -> tuple[MetricComparison, ...]:
    predicted, interval = prediction.metrics, prediction.step_time_interval
    inside = interval.low <= measured.step_time_s <= interval.high
    pairs: list[tuple[str, Unit, float | None, float | None]] = [
        ("step_time_s", "s", predicted.step_time_s, measured.step_time_s),
        ("tokens_per_s", "tokens/s", predicted.tokens_per_s, measured.tokens_per_s),
        (
            "tokens_per_s_per_gpu",
            "tokens/s",
            predicted.tokens_per_s_per_gpu,
            measured.tokens_per_s_per_gpu,
        ),
        (
            "model_flops_per_s_per_gpu",
            "FLOP/s",
            predicted.model_flops_per_s_per_gpu,
            measured.model_flops_per_s_per_gpu,
        ),
        ("mfu", "fraction", predicted.mfu, measured.mfu),
        ("hfu", "fraction", predicted.hfu, measured.hfu),
    ]
    if predicted.memory_bytes and measured.memory_bytes:
        tensors = (predicted.tensor_memory_bytes(), measured.tensor_memory_bytes())
        pairs.append(("tensor_memory_bytes", "bytes", *tensors))
    return tuple(
        MetricComparison(
            metric=name,
            unit=unit,
            predicted=p,
            measured=m,
            signed_error=signed_error(p, m),
            in_interval=inside if name == "step_time_s" else None,
        )
        for name, unit, p, m in pairs
        if p is not None and m is not None
    )


def _tensors(stage: Mapping[str, int]) -> dict[str, float]:
    return {k: float(v) for k, v in stage.items() if k != "reserved"}


def _fullest_stage(
    of: Sequence[Mapping[str, int]], by: Sequence[Mapping[str, int]]
) -> dict[str, float]:
    """Returns the classes of `of` at the stage that is fullest in `by`.

    Where the two count stages differently, each has its own fullest stage.
    """
    if not of:
        return {}
    chooser = by if len(by) == len(of) else of
    sizes = [sum(_tensors(s).values()) for s in chooser]
    return _tensors(of[sizes.index(max(sizes))])


def _classes(
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    order: Sequence[str],
    *,
    whole: float,
) -> tuple[ClassComparison, ...]:
    names = [*order, *sorted((set(predicted) | set(measured)) - set(order))]
    rows = ((n, predicted.get(n, 0.0), measured.get(n, 0.0)) for n in names)
    return tuple(
        ClassComparison(name=n, predicted=p, measured=m, share=(p - m) / whole)
        for n, p, m in rows
        if p or m
    )


def class_causes(predicted: StepMetrics, measured: StepMetrics, noise: float) -> tuple[Cause, ...]:
    """Returns the time classes and the fullest stage's memory classes that stand out.

    Waiting is nobody's class: it follows from the others.

    Args:
        noise: by how much times differ for no reason, as a share.
    """
    step_s = measured.step_time_s
    timed = [*predicted.time_s, *measured.time_s] if measured.time_s else []
    names = [c for c in dict.fromkeys(timed) if c != "idle"]
    seen = [
        Seen(of="time", name=n, ranks=(0,), predicted=p, measured=m,
             sigma=time_sigma(p, m, step_s, noise))
        for n in names
        for p, m in [(predicted.time_s.get(n, 0.0), measured.time_s.get(n, 0.0))]
        if p > 0 or m > 0
    ]  # fmt: skip
    if measured.memory_bytes:
        held = measured.memory_bytes
        mine, theirs = _fullest_stage(predicted.memory_bytes, held), _fullest_stage(held, held)
        seen += memory_seen([mine], [theirs])
    return name_causes(seen, class_suspects(seen))


def tensors_by_stage(metrics: StepMetrics) -> list[int]:
    """Returns each stage's bytes in tensors."""
    return [sum(v for k, v in s.items() if k != "reserved") for s in metrics.memory_bytes]


def largest(
    time_classes: Sequence[ClassComparison], memory_classes: Sequence[ClassComparison]
) -> Finding | None:
    """Returns the class that moves its whole most, where none stands out of the noise."""
    found: list[tuple[Literal["time", "memory"], ClassComparison]] = [
        *(("time", c) for c in time_classes),
        *(("memory", c) for c in memory_classes),
    ]
    if not found:
        return None
    kind, worst = max(found, key=lambda pair: abs(pair[1].share))
    return class_finding(kind, worst.name, worst.predicted, worst.measured, worst.share)
