"""The store as one table, a row a measurement, oldest first.

| column | type | meaning |
|---|---|---|
| id, created, plan_name | str | as in Measurement |
| model_hash, scenario_hash | str | of the plan file that ran; "" if it had none |
| stack_id, gpu, tool_version | str | hardware and software; gpu is "cpu" without one |
| world_size | int64 | ranks |
| plan | str | the split in short, e.g. "pp2 dp1 mbs1"; "" if the plan cannot be read |
| step_time_s, step_time_p10_s, step_time_p90_s | float64 | over the kept steps |
| kept_steps, discarded_steps | int64 | steps behind the median, and warm-up steps |
| tokens_per_s, tokens_per_s_per_gpu | float64 | |
| model_flops_per_s_per_gpu, mfu, hfu | float64 | hfu is NaN where it is not known |
| time_<class>_s | float64 | exposed seconds of each class of TIME_CLASSES, 0 if absent |
| memory_<class>_bytes | int64 | of the fullest stage, each class of MEMORY_CLASSES |
| tensor_memory_bytes | int64 | of the fullest stage, without "reserved" |
| loss_last, held_out_loss, noise_floor | float64 | NaN where they are not known |
| mismatch | str | what differed from the plan, "; " between |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from flopwright.plan.parallel import ParallelPlan
from flopwright.report.metrics import MEMORY_CLASSES, TIME_CLASSES, Measurement

if TYPE_CHECKING:
    import pandas as pd

_TEXT = (
    "id",
    "created",
    "plan_name",
    "model_hash",
    "scenario_hash",
    "stack_id",
    "gpu",
    "tool_version",
    "plan",
    "mismatch",
)
_WHOLE = (
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
    "loss_last",
    "held_out_loss",
    "noise_floor",
)
COLUMNS = _TEXT + _WHOLE + _REAL


def measurements_frame(measurements: Iterable[Measurement]) -> pd.DataFrame:
    """Returns the table above; with no measurements an empty one with the same columns."""
    import pandas as pd

    rows = [_row(m) for m in measurements]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    types = dict.fromkeys(_TEXT, "object") | dict.fromkeys(_WHOLE, "int64")
    return frame.astype(types | dict.fromkeys(_REAL, "float64"))


def _row(m: Measurement) -> dict[str, Any]:
    stage = max(m.metrics.memory_bytes, key=lambda s: sum(s.values()), default={})
    metrics = m.metrics
    return {
        "id": m.id,
        "created": m.created,
        "plan_name": m.plan_name,
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
        **{f"memory_{c}_bytes": stage.get(c, 0) for c in MEMORY_CLASSES},
        "tensor_memory_bytes": metrics.tensor_memory_bytes(),
        "step_time_s": metrics.step_time_s,
        "step_time_p10_s": m.step_time_p10_s,
        "step_time_p90_s": m.step_time_p90_s,
        "tokens_per_s": metrics.tokens_per_s,
        "tokens_per_s_per_gpu": metrics.tokens_per_s_per_gpu,
        "model_flops_per_s_per_gpu": metrics.model_flops_per_s_per_gpu,
        "mfu": metrics.mfu,
        "hfu": metrics.hfu,
        **{f"time_{c}_s": metrics.time_s.get(c, 0.0) for c in TIME_CLASSES},
        "loss_last": m.losses[-1] if m.losses else None,
        "held_out_loss": m.held_out_loss,
        "noise_floor": m.noise_floor,
    }


def _plan_label(plan: dict[str, Any]) -> str:
    try:
        return ParallelPlan.model_validate(plan.get("parallel", {})).label()
    except ValidationError:
        return ""
