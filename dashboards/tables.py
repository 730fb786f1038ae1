"""The dashboard's tables: records in, data frames out, units in the headers."""

from __future__ import annotations

import pandas as pd

from flopwright.planner.result import SearchResult
from flopwright.report.compare_report import ComparisonReport
from flopwright.units import GIB


def ranked(result: SearchResult) -> pd.DataFrame:
    """Returns the plans that fit, best first."""
    return pd.DataFrame(
        [
            {
                "rank": r.rank,
                "plan": r.plan.label(),
                "step time (s)": round(r.prediction.metrics.step_time_s, 4),
                "80 % low (s)": round(r.prediction.step_time_interval.low, 4),
                "80 % high (s)": round(r.prediction.step_time_interval.high, 4),
                "tokens/s a GPU": round(r.prediction.metrics.tokens_per_s_per_gpu, 1),
                "MFU (%)": round(100 * r.prediction.metrics.mfu, 2),
                "peak memory (GiB)": round(r.prediction.metrics.peak_memory_bytes / GIB, 3),
                "headroom (%)": round(100 * r.headroom, 1),
                "variants": r.variants,
            }
            for r in result.ranked
        ]
    )


def infeasible(result: SearchResult) -> pd.DataFrame:
    """Returns the plans that lack memory, each with its violations and nearest fix."""
    return pd.DataFrame(
        [
            {
                "plan": i.plan.label(),
                "missing (GiB)": round(i.missing_bytes / GIB, 3),
                "on stage": i.stage,
                "peak memory (GiB)": round(i.peak_memory_bytes / GIB, 3),
                "step time if it fitted (s)": round(i.step_time_s, 4),
                "rule": "; ".join(v.rule for v in i.violations),
                "nearest fix": "; ".join(v.nearest_fix for v in i.violations if v.nearest_fix),
            }
            for i in result.infeasible
        ]
    )


def compared(report: ComparisonReport) -> pd.DataFrame:
    """Returns one row a run: measured and predicted step time, errors before and after."""
    rows = []
    for run in report.runs:
        step = run.after.metrics[0]
        before = run.before.error("step_time_s") if run.before is not None else None
        memory = run.after.error("tensor_memory_bytes")
        rows.append(
            {
                "run": run.measurement_id,
                "plan": run.plan_name,
                "measured (ms)": round(1e3 * step.measured, 2),
                "predicted (ms)": round(1e3 * step.predicted, 2),
                "error (%)": _percent(step.signed_error),
                "error before (%)": _percent(before),
                "memory error (%)": _percent(memory),
                "in interval": step.in_interval,
                "learnt from": not run.held_out,
                "look first at": run.after.worst.text if run.after.worst is not None else "",
            }
        )
    return pd.DataFrame(rows)


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else round(100 * fraction, 2)
