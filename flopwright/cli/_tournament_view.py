"""How a tournament's result looks: a table for people, one JSON object for programs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flopwright.cli._tournament_run import Outcome
    from flopwright.planner.tournament_result import PlanRow, TournamentResult

_ORIGINS = {"top": "planner", "prior": "uncalibrated planner", "random": "drawn"}


def result_data(outcome: Outcome) -> dict[str, Any]:
    """Returns the result as plain data, with where and when it was measured."""
    assert outcome.result is not None
    return {
        **dict.fromkeys(type(outcome.result).model_fields),  # what is not known is null
        **outcome.result.to_data(),
        "out": str(outcome.folder),
        "machine": outcome.machine,
        "date": datetime.now(UTC).date().isoformat(),
        "repeats": outcome.result.rounds,
        "spread": outcome.result.scatter_log,
    }


def show(outcome: Outcome) -> None:
    """Prints the table and what it means."""
    from flopwright.cli._console import console_of

    result = outcome.result
    assert result is not None
    console = console_of(120)
    console.print(_table(result))
    for line in _lines(result):
        console.print(line, highlight=False)
    if result.refused:
        console.print("left out:", highlight=False)
        for refused in result.refused:
            console.print(f"  {refused.name}: {refused.reason}", highlight=False)
    console.print(f"files: {outcome.folder}", highlight=False)


def _table(result: TournamentResult) -> Any:
    from rich.table import Table

    from flopwright.units import show_seconds

    table = Table(title=f"{result.scenario}: measured, fastest first")
    columns = ("plan", "from", "measured", "behind", "predicted", "uncalibrated", "turns")
    for column in columns:
        table.add_column(column, justify="left" if column in ("plan", "from") else "right")
    for row in result.plans:
        table.add_row(
            f"{row.label}{_mark(row, result)}",
            ", ".join(_ORIGINS[o] for o in row.origins),
            f"{show_seconds(row.measured_step_s)} ±{row.measured_log_std:.1%}",
            f"{row.behind:.1%}",
            show_seconds(row.predicted_step_s),
            show_seconds(row.prior_step_s),
            str(row.turns),
        )
    return table


def _mark(row: PlanRow, result: TournamentResult) -> str:
    return " *" if row.name == result.chosen else ""


def _lines(result: TournamentResult) -> list[str]:
    own, prior = result.calibrated, result.uncalibrated
    noise = "not known" if result.noise_floor is None else f"{result.noise_floor:.1%}"
    crossed = ""
    if result.regret_crossed is not None:
        crossed = f" ({result.regret_crossed:+.1%} against the best of the other launches)"
    lines = [
        f"* the planner's choice: {result.chosen}, {own.regret:.1%} slower than the measured best"
        f"{crossed}; noise floor {noise}",
        f"  rank correlation {own.spearman:.2f}, median error {own.median_error:.1%}, each plan "
        "priced by a calibration that has not seen it",
        f"  uncalibrated it would have chosen {prior.chosen}: {prior.regret:.1%} slower, rank "
        f"correlation {prior.spearman:.2f}, median error {prior.median_error:.1%}",
    ]
    if not result.finished:
        lines.append("  not finished: these are the turns so far")
    return lines
