"""The one table that measurements, comparisons, sweeps and published runs come as.

A row a measurement, a round, a stage, or a prediction, oldest first. A number that a row does
not have is NaN in a float64 column and 0 in an int64 one; a text it does not have is "".

| column | type | meaning |
|---|---|---|
| kind | str | "step", "round" or "stage" |
| source | str | "measured", "predicted", "before" (a calibration), "swept", "published" |
| id, created, plan_name | str | as in Measurement; of a round or a stage those of its record |
| index | int64 | number of the round or stage in its record; 0 of a step |
| phase | str | workload's kind of a step ("pretrain"), name of a stage |
| model_hash, scenario_hash | str | of the plan file that ran |
| stack_id, gpu, tool_version | str | hardware and software; gpu is "cpu" without one |
| calibration_id | str | what a prediction was made with |
| world_size | int64 | ranks |
| plan | str | the split in short, e.g. "pp2 dp1 mbs1" |
| step_time_s, step_time_p10_s, step_time_p90_s | float64 | of kept steps; or an interval |
| kept_steps, discarded_steps | int64 | steps behind the median, and warm-up steps |
| tokens_per_s, tokens_per_s_per_gpu | float64 | |
| model_flops_per_s_per_gpu, mfu, hfu | float64 | |
| time_<class>_s | float64 | exposed seconds of each class of TIME_CLASSES |
| round_time_s, time_<phase>_s | float64 | a round, and each phase of ROUND_PHASES |
| generated_tokens | float64 | of a round |
| wall_s, gpu_s, cost_usd | float64 | of a stage |
| memory_<class>_bytes | int64 | of the fullest stage, each class of MEMORY_CLASSES |
| tensor_memory_bytes | int64 | of the fullest stage, without "reserved" |
| loss_last, held_out_loss, noise_floor | float64 | |
| mismatch | str | what differed from the plan, "; " between |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from flopwright.plan.parallel import ParallelPlan
from flopwright.report.compare_report import ComparedRun
from flopwright.report.metrics import (
    MEMORY_CLASSES,
    TIME_CLASSES,
    Measurement,
    Prediction,
    StepMetrics,
)
from flopwright.report.records import ROUND_PHASES, Record

if TYPE_CHECKING:
    import pandas as pd

_TEXT = (
    "kind",
    "source",
    "id",
    "created",
    "plan_name",
    "phase",
    "model_hash",
    "scenario_hash",
    "stack_id",
    "gpu",
    "tool_version",
    "calibration_id",
    "plan",
    "mismatch",
)
_WHOLE = (
    "index",
    "world_size",
    "kept_steps",
    "discarded_steps",
    *(f"memory_{c}_bytes" for c in MEMORY_CLASSES),
    "tensor_memory_bytes",
)
_REAL = (
    "step_time_s",
    "step_time_p10_s",
    "step_time_p90_s",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "model_flops_per_s_per_gpu",
    "mfu",
    "hfu",
    *(f"time_{c}_s" for c in TIME_CLASSES),
    "round_time_s",
    *(f"time_{p}_s" for p in ROUND_PHASES),
    "generated_tokens",
    "wall_s",
    "gpu_s",
    "cost_usd",
    "loss_last",
    "held_out_loss",
    "noise_floor",
)
COLUMNS = _TEXT + _WHOLE + _REAL
Row = dict[str, Any]


def frame_of(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Returns rows as the table above; without rows an empty one with the same columns.

    Args:
        rows: values by column; what a row lacks is "", 0 or NaN.

    Raises:
        KeyError: a column that the table does not have.
    """
    import pandas as pd

    found = [dict(row) for row in rows]
    unknown = {name for row in found for name in row} - set(COLUMNS)
    if unknown:
        raise KeyError(f"no column of the table: {', '.join(sorted(unknown))}")
    blank = dict.fromkeys(_TEXT, "") | dict.fromkeys(_WHOLE, 0) | dict.fromkeys(_REAL, None)
    frame = pd.DataFrame([blank | row for row in found], columns=list(COLUMNS))
    types = dict.fromkeys(_TEXT, "object") | dict.fromkeys(_WHOLE, "int64")
    return frame.astype(types | dict.fromkeys(_REAL, "float64"))


def joined(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Returns several such tables as one, by when rows were created."""
    import pandas as pd

    parts = [f for f in frames if len(f)]
    if not parts:
        return frame_of([])
    order = ["created", "id", "index"]
    return pd.concat(parts, ignore_index=True).sort_values(order, kind="stable", ignore_index=True)


def measurements_frame(measurements: Iterable[Measurement]) -> pd.DataFrame:
    """Returns a row a measurement."""
    return frame_of(_row(m) for m in measurements)


def records_frame(records: Iterable[Record]) -> pd.DataFrame:
    """Returns a row a round or stage; an engine's log has neither, and no rows."""
    return frame_of(row for record in records for row in _record_rows(record))


def predictions_frame(
    predictions: Iterable[Prediction], source: str = "predicted"
) -> pd.DataFrame:
    """Returns a row a prediction."""
    return frame_of(prediction_row(p, source) for p in predictions)


def prediction_row(prediction: Prediction, source: str = "predicted") -> Row:
    """Returns a prediction's values by column."""
    interval = prediction.step_time_interval
    return {
        "kind": "step",
        "source": source,
        "id": f"{prediction.plan_name}:{prediction.calibration_id or ''}",
        "plan_name": prediction.plan_name,
        "calibration_id": prediction.calibration_id or "",
        "step_time_p10_s": interval.low,
        "step_time_p90_s": interval.high,
        **step_values(prediction.metrics),
    }


def step_values(metrics: StepMetrics) -> Row:
    """Returns a step's numbers by column."""
    stage = max(metrics.memory_bytes, key=lambda s: sum(s.values()), default={})
    # a log that tells no classes has none, which is not that they are 0
    untimed = None if not metrics.time_s else 0.0
    return {
        **{f"memory_{c}_bytes": stage.get(c, 0) for c in MEMORY_CLASSES},
        "tensor_memory_bytes": metrics.tensor_memory_bytes(),
        "step_time_s": metrics.step_time_s,
        "tokens_per_s": metrics.tokens_per_s,
        "tokens_per_s_per_gpu": metrics.tokens_per_s_per_gpu,
        "model_flops_per_s_per_gpu": metrics.model_flops_per_s_per_gpu,
        "mfu": metrics.mfu,
        "hfu": metrics.hfu,
        **{f"time_{c}_s": metrics.time_s.get(c, untimed) for c in TIME_CLASSES},
    }


def _row(m: Measurement) -> Row:
    return {
        "kind": "step",
        "source": "measured",
        "id": m.id,
        "created": m.created,
        "plan_name": m.plan_name,
        "phase": phase_of(m.plan),
        "model_hash": str(m.plan.get("model_hash", "")),
        "scenario_hash": str(m.plan.get("scenario_hash", "")),
        "stack_id": m.fingerprint.stack_id(),
        "gpu": m.fingerprint.gpu or "cpu",
        "tool_version": m.fingerprint.tool_version,
        "plan": _plan_label(m.plan),
        "mismatch": "; ".join(m.mismatch),
        "world_size": m.fingerprint.world_size,
        "kept_steps": len(m.step_time_samples_s),
        "discarded_steps": m.discarded_steps,
        "step_time_p10_s": m.step_time_p10_s,
        "step_time_p90_s": m.step_time_p90_s,
        **step_values(m.metrics),
        "loss_last": m.losses[-1] if m.losses else None,
        "held_out_loss": m.held_out_loss,
        "noise_floor": m.noise_floor,
    }


def _record_rows(record: Record) -> Iterable[Row]:
    about: Row = {
        "source": "measured",
        "id": record.id,
        "created": record.created,
        "plan_name": record.name,
        "tool_version": record.source,
    }
    if record.kind == "rounds":
        for sample in record.rounds:
            yield about | {
                "kind": "round",
                "index": sample.round,
                "world_size": record.gpus or 0,
                "round_time_s": sample.round_time_s,
                **{f"time_{p}_s": sample.time_s.get(p) for p in ROUND_PHASES},
                "generated_tokens": sample.generated_tokens,
                "tokens_per_s": sample.tokens_per_s,
            }
    elif record.kind == "stages":
        for number, stage in enumerate(record.stages):
            yield about | {
                "kind": "stage",
                "index": number,
                "phase": stage.stage,
                "wall_s": stage.wall_s,
                "gpu_s": stage.gpu_s,
                "cost_usd": stage.cost_usd,
            }


def phase_of(plan: Mapping[str, Any]) -> str:
    """Returns the kind of a plan file's workload; "" of a plan that says none."""
    scenario = plan.get("scenario")
    workload = scenario.get("workload") if isinstance(scenario, dict) else None
    return str(workload.get("kind", "")) if isinstance(workload, dict) else ""


def _plan_label(plan: Mapping[str, Any]) -> str:
    try:
        return ParallelPlan.model_validate(plan.get("parallel", {})).label()
    except ValidationError:
        return ""


def comparison_frame(runs: Iterable[ComparedRun]) -> pd.DataFrame:
    """Returns three rows a compared run: what was predicted before and after, and measured."""
    return frame_of(row for run in runs for row in _compared_rows(run))


def _compared_rows(run: ComparedRun) -> Iterable[Row]:
    about: Row = {
        "kind": "step",
        "id": run.measurement_id,
        "plan_name": run.plan_name,
        "plan": run.plan,
        "phase": run.phase,
        "stack_id": run.stack_id,
    }
    after = run.after
    sides = (("before", run.before, "predicted"), ("predicted", after, "predicted"),
             ("measured", after, "measured"))  # fmt: skip
    for source, found, side in sides:
        if found is None:
            continue
        yield about | {
            "source": source,
            "calibration_id": "" if source == "measured" else found.calibration_id or "",
            **{m.metric: getattr(m, side) for m in found.metrics if m.metric in _REAL},
            **{f"time_{c.name}_s": getattr(c, side) for c in found.time_classes},
            **{f"memory_{c.name}_bytes": int(getattr(c, side)) for c in found.memory_classes},
            "tensor_memory_bytes": int(sum(getattr(c, side) for c in found.memory_classes)),
        }
