"""The store's runs predicted again, as `flopwright compare` does (a test holds them equal)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from flopwright.dashboards.results import results
from flopwright.errors import InputError
from flopwright.report.compare_report import ComparisonReport, make_report
from flopwright.report.drift import find_drifts
from flopwright.report.metrics import Measurement
from flopwright.simulator.calibration.files import own_calibrations
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.calibration.repredict import prior_of
from flopwright.simulator.comparison.run import compared_run


def calibrations(measurements: Sequence[Measurement]) -> dict[str, Calibration]:
    """Returns by id what the runs can be predicted with, the default first.

    The user's own calibrations of the runs' stacks, those of the latest run's stack first
    and newest, and the public prior of the latest run's processor.
    """
    latest = measurements[-1].fingerprint.stack_id()
    stacks = {m.fingerprint.stack_id() for m in measurements}
    own = [c for c in own_calibrations() if c.stack_id in stacks]
    public = prior_of(measurements[-1])
    order = [
        *(c for c in own if c.stack_id == latest),
        public,
        *(c for c in own if c.stack_id != latest),
    ]
    return {c.id: c for c in order}


class Compared(NamedTuple):
    """Runs compared, and by plan name the rule that stands against those not to be predicted."""

    report: ComparisonReport
    left_out: dict[str, str]


def compared_runs(measurements: Sequence[Measurement], calibration: Calibration) -> Compared:
    """Returns the runs of the calibration's stack compared under it; once for the same runs.

    Where the calibration was learnt or measured, the public prior stands beside it as
    `before`.

    Raises:
        InputError: none of them can be predicted.
    """
    kind = "compared " + " ".join(m.content_hash() for m in measurements)
    kept = results().get(kind, calibration)
    if kept is None:
        kept = _compared(measurements, calibration)
        results().put(kind, calibration, kept)
    assert isinstance(kept, Compared)
    return kept


def _compared(measurements: Sequence[Measurement], calibration: Calibration) -> Compared:
    runs, refused = [], dict[str, InputError]()
    for measurement in measurements:
        if calibration.stack_id in {"", measurement.fingerprint.stack_id()}:
            public = prior_of(measurement)
            before = None if calibration == public else public
            try:
                runs.append(compared_run(measurement, before, calibration))
            except InputError as error:
                refused[measurement.plan_name] = error
    if refused and not runs:
        raise next(iter(refused.values()))
    words = {name: "; ".join(v.rule for v in e.violations) for name, e in refused.items()}
    kept = [m for m in measurements if m.plan_name not in refused]
    return Compared(make_report(runs, find_drifts(kept)), words)


def chosen_runs(measurements: Sequence[Measurement], words: str) -> list[Measurement]:
    """Returns the runs that hold every word in their plan, id, date, model or stack."""
    wanted = words.lower().split()
    return [m for m in measurements if all(word in _text(m) for word in wanted)]


def holding(rows: pd.DataFrame, words: str) -> pd.DataFrame:
    """Returns the rows that hold every word in one of their columns."""
    wanted = words.lower().split()
    texts = rows.astype(str).agg(" ".join, axis="columns").str.lower() if len(rows) else rows
    for word in wanted if len(rows) else ():
        rows = rows[texts[rows.index].str.contains(word, regex=False)]
    return rows


def _text(run: Measurement) -> str:
    where = run.fingerprint
    model = run.plan.get("scenario", {}).get("model", {}).get("name", "") if run.plan else ""
    parts = (
        run.plan_name, run.id, run.created, model, where.stack_id(), where.gpu or "",
        where.processor, where.machine,
    )  # fmt: skip
    return " ".join(map(str, parts)).lower()
