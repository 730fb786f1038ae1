"""The dashboard's tables: records in, data frames out, units in the headers."""

from __future__ import annotations

import pandas as pd

from flopwright.planner.result import SearchResult
from flopwright.report.compare_report import ComparisonReport
from flopwright.report.metrics import Prediction
from flopwright.units import GIB


def ranked(result: SearchResult) -> pd.DataFrame:
    """Returns the plans that fit, best first."""
    return pd.DataFrame(
        [
            {
                "rank": r.rank,
                "plan": r.plan.label(),
                "step time (s)": four_digits(r.prediction.metrics.step_time_s),
                "80 % interval (s)": _interval(r.prediction),
                "tokens/s a GPU": four_digits(r.prediction.metrics.tokens_per_s_per_gpu),
                "MFU (%)": four_digits(100 * r.prediction.metrics.mfu),
                "peak memory (GiB)": four_digits(r.prediction.metrics.peak_memory_bytes / GIB),
                "headroom (%)": round(100 * r.headroom, 1),
                "variants": r.variants,
            }
            for r in result.ranked
        ]
    )


def as_markdown(rows: pd.DataFrame) -> str:
    """Returns a small table as Markdown, numbers to the right."""
    numbers = [pd.api.types.is_numeric_dtype(kind) for kind in rows.dtypes]
    lines = [list(rows.columns), ["--:" if right else "---" for right in numbers]]
    lines += [[_text(value) for value in row] for row in rows.astype(object).to_numpy()]
    return "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def infeasible(result: SearchResult) -> pd.DataFrame:
    """Returns the plans that lack memory, each with its violations and nearest fix."""
    return pd.DataFrame(
        [
            {
                "plan": i.plan.label(),
                "missing (GiB)": four_digits(i.missing_bytes / GIB),
                "on stage": i.stage,
                "peak memory (GiB)": four_digits(i.peak_memory_bytes / GIB),
                "step time if it fitted (s)": four_digits(i.step_time_s),
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
        row = {
            "run": run.measurement_id,
            "plan": run.plan_name,
            "measured (ms)": four_digits(1e3 * step.measured),
            "predicted (ms)": four_digits(1e3 * step.predicted),
            "error (%)": _percent(step.signed_error),
            "in interval": "yes" if step.in_interval else "no",
            "tensor memory error (%)": _percent(run.after.error("tensor_memory_bytes")),
        }
        if run.before is not None:
            row["error before (%)"] = _percent(run.before.error("step_time_s"))
            row["learnt from"] = "no" if run.held_out else "yes"
        rows.append(row)
    return pd.DataFrame(rows)


def rounds_and_stages(stored: pd.DataFrame) -> pd.DataFrame:
    """Returns the store's rounds and stages, out of its one table (flopwright.store.frame)."""
    other = stored[stored["kind"] != "step"]
    columns = {
        "created": "when",
        "kind": "kind",
        "plan_name": "name",
        "phase": "stage",
        "round_time_s": "round (s)",
        "tokens_per_s": "tokens/s",
        "wall_s": "stage (s)",
        "cost_usd": "USD",
    }
    return other[list(columns)].rename(columns=columns).dropna(axis="columns", how="all")


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else round(100 * fraction, 1)


def four_digits(value: float | None) -> float | None:
    """Returns the value to four digits: more would claim more than is known."""
    return None if value is None else float(f"{value:.4g}")


def _interval(prediction: Prediction) -> str:
    interval = prediction.step_time_interval
    return f"{interval.low:.4g} to {interval.high:.4g}"
