"""The accuracy report: scores of all runs, of groups, of cells, and of the baselines beside them.

Headline ("overall"): one prediction a configuration, runs measured in time on NVIDIA and AMD
processors, nothing that is set apart (rows that are no raw measurement, rows known to be odd,
runs whose plan is the planner's own). What is set apart has groups of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flopwright.simulator.accuracy.score import (
    MacroScore,
    Score,
    Scored,
    grouped,
    macro,
    score,
    under_by_5_percent_share,
)

# Labels of a run that --by may name.
LABELS: Final = (
    "source", "gpu", "model", "family", "stack", "framework", "precision", "recompute", "cell",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row without a prediction.

    Attributes:
        in_scope: whether it should have had one: it then lowers the coverage.
        configuration: key of the configuration it belongs to.
        labels: what is known of it to group it by.
    """

    id: str
    reason: str
    in_scope: bool
    configuration: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a much simpler predictor scores on the same runs."""

    about: str
    runs: tuple[Scored, ...]
    free_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyReport:
    """Predictions beside measurements.

    Attributes:
        file: name of the file of measurements.
        protocol: how the predictions were made, in words.
        runs: step times, every configuration that was predicted; `apart` of a run's labels
            says why it is not in the headline ("" where it is).
        memory: peaks, one for each definition that a configuration states.
        by: labels whose combinations have groups.
        free_parameters: scalars that were fitted to measured runs.
    """

    file: str
    protocol: str
    runs: tuple[Scored, ...]
    memory: tuple[Scored, ...]
    skipped: tuple[Skipped, ...]
    by: tuple[str, ...]
    free_parameters: int
    parameters_by_level: Mapping[str, int]
    baselines: Mapping[str, Baseline]
    assumptions: tuple[str, ...] = ()

    def headline(self) -> tuple[Scored, ...]:
        """Returns the runs of the headline."""
        return tuple(r for r in self.runs if not r.labels["apart"])

    def overall(self) -> tuple[Score, MacroScore]:
        """Returns the headline's score, by configuration and by cell."""
        runs = self.headline()
        missing = {s.configuration for s in self.skipped if s.in_scope}
        return score(runs, len(runs) + len(missing)), macro(runs)

    def standing_groups(self) -> dict[str, tuple[Scored, ...]]:
        """Returns the groups that every report has: families, and what is set apart."""
        out: dict[str, list[Scored]] = {"dense": [], "moe": []}
        for run in self.headline():
            out[run.labels["family"]].append(run)
        for run in self.runs:
            for flag in run.labels["apart"].split():
                out.setdefault(flag, []).append(run)
            for group in run.labels["also"].split():
                out.setdefault(group, []).append(run)
        return {name: tuple(runs) for name, runs in out.items()}

    def groups(self) -> dict[str, Score]:
        """Returns the standing groups' scores and those of each combination of `by`."""
        out = {name: score(runs) for name, runs in self.standing_groups().items()}
        if not self.by:
            return out
        runs = grouped(self.headline(), self._combination)
        missing: dict[str, set[str]] = {}
        for row in self.skipped:
            if row.in_scope:
                key = " | ".join(row.labels.get(b, "?") for b in self.by)
                missing.setdefault(key, set()).add(row.configuration)
        for key in sorted({*runs, *missing}):
            mine = runs.get(key, [])
            out[key] = score(mine, len(mine) + len(missing.get(key, ())))
        return out

    def _combination(self, run: Scored) -> str:
        return " | ".join(run.labels[b] for b in self.by)

    def memory_scores(self) -> dict[str, Any]:
        """Returns the memory's score over all definitions, and by definition."""
        out: dict[str, Any] = _memory_data(self.memory)
        by_definition = grouped(self.memory, lambda r: r.labels["definition"])
        out["groups"] = {name: _memory_data(runs) for name, runs in sorted(by_definition.items())}
        return out

    def to_data(self) -> dict[str, Any]:
        """Returns the report as plain data, the JSON of `flopwright accuracy --json`."""
        overall, cells = self.overall()
        ids = {r.id for r in self.headline()}
        return {
            "file": self.file,
            "protocol": self.protocol,
            "overall": {**overall.to_data(), "macro": cells.to_data()},
            "groups": {name: s.to_data() for name, s in self.groups().items()},
            "memory": self.memory_scores(),
            "skipped": [{"id": s.id, "reason": s.reason} for s in self.skipped],
            "free_parameters": self.free_parameters,
            "parameters_by_level": dict(self.parameters_by_level),
            "baselines": {
                name: _baseline_data(baseline, ids) for name, baseline in self.baselines.items()
            },
            "assumptions": list(self.assumptions),
            "runs": [_run_data(r) for r in self.runs],
        }


def _memory_data(runs: Sequence[Scored]) -> dict[str, Any]:
    return {**score(runs).to_data(), "under_by_5_percent_share": under_by_5_percent_share(runs)}


def _baseline_data(baseline: Baseline, ids: set[str]) -> dict[str, Any]:
    runs = [r for r in baseline.runs if r.id in ids]
    return {
        "about": baseline.about,
        **score(runs).to_data(),
        "macro": macro(runs).to_data(),
        "free_parameters": baseline.free_parameters,
    }


def _run_data(run: Scored) -> dict[str, Any]:
    return {
        "id": run.id,
        "measured_s": run.measured,
        "predicted_s": run.predicted,
        "interval80_s": [run.low, run.high],
        "error": run.error,
        "apart": run.labels["apart"],
        "assumed": list(run.assumed),
        **{label: run.labels[label] for label in LABELS},
    }
