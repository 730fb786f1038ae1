"""Hand-tuned configurations among all plans, as a table on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from flopwright.planner.regret import CLOSE, TOP_SHARE, WANTED_SHARE, Regret, TunedRun


def show(console: Console, found: Regret) -> None:
    """Prints one line a run, what is better than it and why, and the totals."""
    console.print(_table(found))
    for run in found.runs:
        _show_better(console, run)
    for run_id, reason in found.skipped:
        console.print(f"skipped {run_id}: {reason}", highlight=False, soft_wrap=True)
    count = len(found.runs)
    shares = (
        (f"fit in our model: {found.feasible} of {count}", "asked: all"),
        (
            f"among the best {TOP_SHARE:.0%} of the plans that fit: {found.near_top} of {count}",
            f"asked: {WANTED_SHARE:.0%}",
        ),
        (f"within {CLOSE:.0%} of our best: {found.close} of {count}", "asked: all"),
    )
    for text, asked in shares:
        console.print(f"{text} ({asked})", highlight=False, soft_wrap=True)


def _table(found: Regret) -> Table:
    table = Table(title="Hand-tuned configurations among all plans for the same GPUs and batch")
    table.add_column("run", overflow="fold")
    table.add_column("plan", overflow="fold")
    for name in ("measured [s]", "predicted", "rank of layouts", "top", "behind our best"):
        table.add_column(name, justify="right")
    for run in found.runs:
        table.add_row(
            f"{run.id} {run.model} {run.num_gpus} {run.gpu}",
            run.label + (f" ({run.assumed})" if run.assumed else ""),
            f"{run.measured_step_s:.3g}",
            f"{run.predicted_step_s / run.measured_step_s - 1:+.1%}",
            f"{run.rank} of {run.layouts}",
            f"{run.top_share:.1%}",
            run.lacks or f"{run.behind:.1%}",
        )
    return table


def _show_better(console: Console, run: TunedRun) -> None:
    if not run.better:
        return
    console.print(f"{run.id}: said to be more than {CLOSE:.0%} better", highlight=False)
    for plan in run.better:
        console.print(
            f"  {plan.plan.label()}: {plan.gain:.1%} less time: {plan.reason}",
            highlight=False,
            soft_wrap=True,
        )
