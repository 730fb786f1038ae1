"""How close predictions are to published RL and serving rows: figures, rows, what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwright.errors import InputError, Violation
from flopwright.simulator.accuracy.rl.chosen import Chosen, chosen_numbers
from flopwright.simulator.accuracy.rl.load import FOLDER, load_scenarios
from flopwright.simulator.accuracy.rl.predictor import Fitted, Predictor
from flopwright.simulator.accuracy.rl.rows import Row, read_rows
from flopwright.simulator.accuracy.rl.schema import RlScenario, ScoredRow
from flopwright.simulator.accuracy.rl.score import (
    Ordered,
    Scored,
    Skipped,
    score_row,
    weighted_quantile,
)

Advance = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RlReport:
    """What was scored.

    Attributes:
        scored: absolute rows and ratios; ordered: orders; skipped: the rest, with reasons.
        fitted: unknowns chosen by rows that are not scored.
        chosen: numbers of a system or an engine, fitted once.
        assumed: how many inputs the scenarios assume.
    """

    scored: tuple[Scored, ...]
    ordered: tuple[Ordered, ...]
    skipped: tuple[Skipped, ...]
    fitted: tuple[Fitted, ...]
    chosen: tuple[Chosen, ...]
    assumed: int

    def absolute(self, *classes: str) -> tuple[Scored, ...]:
        """Returns the absolute rows of these classes (F1, F2)."""
        return tuple(s for s in self.scored if s.row_class in classes)

    @property
    def scenarios(self) -> tuple[str, ...]:
        """The names of the scenarios that rows were to be predicted by, sorted."""
        names = {s.scenario for s in self.scored} | {o.scenario for o in self.ordered}
        return tuple(sorted(names | {s.scenario for s in self.skipped if s.lost}))

    def lost(self, *classes: str) -> tuple[Skipped, ...]:
        """Returns the rows of these classes that could not be predicted."""
        return tuple(s for s in self.skipped if s.lost and s.row_class in classes)

    def to_data(self) -> dict[str, Any]:
        """Returns the report as plain data."""
        absolute = _figures(self, ("F1", "F2"))
        absolute |= {k: _figures(self, (k,), short=True) for k in ("F1", "F2")}
        ratio = _figures(self, ("R",))
        signs = [s.sign_right for s in self.absolute("R") if s.sign_right is not None]
        ratio["signs"] = {"n": len(signs), "right": sum(signs)}
        return {
            "absolute": absolute,
            "ratio": ratio,
            "order": {
                "n": len(self.ordered),
                "right": sum(o.right for o in self.ordered),
                "coverage": _share(len(self.ordered), len(self.lost("O"))),
                "rows": [
                    {"id": o.id, "scenario": o.scenario, "right": o.right,
                     "checks": [{"check": c, "holds": ok} for c, ok in o.checks]}
                    for o in self.ordered
                ],
            },
            "skipped": [
                {"id": s.id, "class": s.row_class, "why": s.why, "lost": s.lost}
                for s in self.skipped
            ],
            "free_parameters": {
                "n": len(self.fitted) + len(self.chosen),
                "fitted": [
                    {"scenario": f.scenario, "field": f.field, "row": f.row, "value": f.value}
                    for f in self.fitted
                ],
                "of_systems": [
                    {"of": list(c.of), "field": c.field, "value": c.value, "rows": list(c.rows)}
                    for c in self.chosen
                ],
                "assumed_inputs": self.assumed,
            },
        }  # fmt: skip


def _share(done: int, lost: int) -> float:
    return done / (done + lost) if done + lost else 0.0


def _rows_of(scored: Iterable[Scored]) -> int:
    """Returns how many rows: parts of one cell are one."""
    return len({s.id for s in scored})


def weights_of(scored: Sequence[Scored]) -> list[float]:
    """Returns the weight of each row, so that a preset counts once."""
    count = Counter(s.preset for s in scored)
    return [1 / count[s.preset] for s in scored]


def median_and_p90(scored: Sequence[Scored]) -> tuple[float | None, float | None]:
    """Returns the median and p90 of the absolute errors, every preset counted once."""
    if not scored:
        return None, None
    errors, weights = [abs(s.error) for s in scored], weights_of(scored)
    return weighted_quantile(errors, weights, 0.5), weighted_quantile(errors, weights, 0.9)


def _figures(report: RlReport, classes: tuple[str, ...], *, short: bool = False) -> dict[str, Any]:
    scored = report.absolute(*classes)
    median, p90 = median_and_p90(scored)
    done = _rows_of(scored)
    out: dict[str, Any] = {
        "n": done,
        "coverage": _share(done, len({s.id for s in report.lost(*classes)})),
        "median_abs_error": median,
        "p90_abs_error": p90,
    }
    equal = [1.0] * len(scored)
    errors = [abs(s.error) for s in scored]
    out["median_abs_error_of_rows"] = weighted_quantile(errors, equal, 0.5) if scored else None
    if "F2" in classes:
        out["undetermined"] = sorted({s.id for s in scored if s.undetermined})
    if short:
        return out
    out["per_preset"] = {k: _group(v) for k, v in _grouped(scored, "preset").items()}
    out["per_scenario"] = {
        k: _group(v) | {"rows": [_row(s) for s in v]}
        for k, v in _grouped(scored, "scenario").items()
    }
    return out


def _grouped(scored: Iterable[Scored], by: str) -> dict[str, list[Scored]]:
    groups: dict[str, list[Scored]] = {}
    for s in scored:
        groups.setdefault(getattr(s, by), []).append(s)
    return dict(sorted(groups.items()))


def _group(scored: Sequence[Scored]) -> dict[str, Any]:
    errors, equal = [abs(s.error) for s in scored], [1.0] * len(scored)
    return {
        "n": _rows_of(scored),
        "median_abs_error": weighted_quantile(errors, equal, 0.5),
        "p90_abs_error": weighted_quantile(errors, equal, 0.9),
    }


def _row(s: Scored) -> dict[str, Any]:
    return {
        "id": s.id,
        "part": s.part,
        "class": s.row_class,
        "metric": s.metric,
        "predicted": s.predicted,
        "measured": s.measured,
        "error": s.error,
        "band": [s.low, s.high],
        "undetermined": s.undetermined,
        "sign_right": s.sign_right,
    }


def rl_report(file: Path, folder: Path = FOLDER, advance: Advance | None = None) -> RlReport:
    """Returns the report of a file of rows under the scenarios of a directory.

    Args:
        advance: called with (rows done, rows in all).

    Raises:
        InputError: every violation of the file or the scenarios, or no row that any names.
    """
    broken: list[Violation] = []
    rows: dict[str, Row] = {}
    scenarios: dict[str, RlScenario] = {}
    try:
        scenarios = load_scenarios(folder)
    except InputError as error:
        broken.extend(error.violations)
    try:
        rows = read_rows(file)
    except InputError as error:
        broken.extend(error.violations)
    if broken:
        raise InputError(broken)
    named = [(s, r) for s in scenarios.values() for r in s.rows if r.id in rows]
    if not named:
        raise InputError(
            Violation(file=str(file), rule=f"no scenario of {folder} names a row of it",
                      nearest_fix="give the rows' own scenarios with --scenarios")
        )  # fmt: skip
    return _score(rows, scenarios, named, advance)


def _score(
    rows: dict[str, Row],
    scenarios: dict[str, RlScenario],
    named: list[tuple[RlScenario, ScoredRow]],
    advance: Advance | None,
) -> RlReport:
    predictor = Predictor(scenarios, rows)
    results: list[Scored | Ordered | Skipped] = []
    for done, (scenario, given) in enumerate(named):
        results.append(score_row(predictor, scenario, given, rows[given.id]))
        if advance is not None:
            advance(done + 1, len(named))
    known = {given.id for _, given in named}
    missing = [
        Skipped(id=i, row_class="", why="no scenario names it", lost=False)
        for i in rows
        if i not in known
    ]
    used = {s.name for s, _ in named}
    fitted = [f for key, f in predictor.fitted.items() if key[0].endswith("@")]
    return RlReport(
        scored=tuple(r for r in results if isinstance(r, Scored)),
        ordered=tuple(r for r in results if isinstance(r, Ordered)),
        skipped=(*(r for r in results if isinstance(r, Skipped)), *missing),
        fitted=tuple(fitted),
        chosen=chosen_numbers(scenarios[n] for n in sorted(used)),
        assumed=sum(len(scenarios[n].assumed) for n in used),
    )
