"""How a recommendation is shown, and the bar while it is worked out."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

from flopwright.planner.explain import legend, noticeable
from flopwright.planner.recommend_answer import Means, Optimum, Recommendation
from flopwright.planner.recommend_sizes import show_usd
from flopwright.simulator.calibration.model import Calibration
from flopwright.units import show_bytes, show_count, show_percent, show_seconds

_DAY_S = 86_400.0


def with_progress(
    work: Callable[[Means], Recommendation], calibration: Calibration, *, quiet: bool
) -> Recommendation:
    """Returns what `work` finds, with a bar that says what is tried on a terminal."""
    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def say(text: str) -> None:
            bar.update(task, description=text, completed=0, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return work(Means(calibration=calibration, say=say, progress=advance))


def show(console: Console, found: Recommendation) -> None:
    """Prints the answer, what was tried, the laws' figures, the plan and what it rests on."""
    colour = "green" if found.found else "red"
    console.print(f"[bold {colour}]{found.answer}[/]", highlight=False, soft_wrap=True)
    if found.missing:
        console.print(f"[bold]What is missing:[/] {found.missing}", highlight=False)
    if found.attempts:
        console.print(_attempts_table(found))
    if found.optimum is not None:
        _print_optimum(console, found.optimum)
    _print_plan(console, found)
    for text in found.assumptions:
        console.print(f"  assumed: {text}", highlight=False, soft_wrap=True)
    for text in found.sources:
        console.print(f"  source: {text}", highlight=False, soft_wrap=True)


def _attempts_table(found: Recommendation) -> Table:
    table = Table(title="Tried", title_justify="left")
    for name in ("value", "", "what was found"):
        table.add_column(name, overflow="fold")
    for row in found.attempts:
        table.add_row(row.tried, "yes" if row.holds else "no", row.why)
    return table


def _print_optimum(console: Console, optimum: Optimum) -> None:
    rates = Table(title="Peak learning rate and batch, by law", title_justify="left")
    for name in ("law", "learning rate", "tokens a step", "sequences", "in its range"):
        rates.add_column(name, justify="left" if name == "law" else "right")
    for r in optimum.rates:
        cells = (f"{r.learning_rate:.3g}", show_count(r.batch_tokens), f"{r.batch_sequences:,.0f}")
        rates.add_row(r.law, *cells, "yes" if r.inside else "no: extrapolated")
    console.print(rates)
    table = Table(title="Vocabulary against sequence length, same text", title_justify="left")
    names = ("vocabulary", "its weights", "share of N", "context", "FLOPs for the text", "")
    for name in names:
        table.add_column(name, justify="right" if name else "left")
    for v in optimum.vocabulary:
        cells = (show_count(v.params), show_percent(v.share), f"{v.seq_len:,}")
        table.add_row(f"{v.vocab_size:,}", *cells, f"{v.flops_per_text:.3g} x", v.why)
    console.print(table)


def _print_plan(console: Console, found: Recommendation) -> None:
    plan, run = found.plan, found.run
    if plan is None or run is None:
        return
    metrics, interval = plan.prediction.metrics, plan.prediction.step_time_interval
    label = plan.plan.label()
    console.print(f"[bold]Plan:[/] {label} on {run.gpus:,} GPUs", highlight=False)
    console.print(f"  {legend([label])}", highlight=False, soft_wrap=True)
    console.print(
        f"  step {show_seconds(metrics.step_time_s)} ({interval.probability:.0%} interval "
        f"{show_seconds(interval.low)} to {show_seconds(interval.high)}), "
        f"MFU {100 * metrics.mfu:.1f} %, peak {show_bytes(metrics.peak_memory_bytes)} a GPU, "
        f"{show_percent(plan.headroom)} free",
        highlight=False,
        soft_wrap=True,
    )
    money = "price unknown" if run.usd is None else show_usd(run.usd)
    low, high = run.days_interval.low * _DAY_S, run.days_interval.high * _DAY_S
    console.print(
        f"[bold]To the token budget:[/] {show_count(run.tokens)} tokens, "
        f"{show_seconds(run.days * _DAY_S)} ({show_seconds(low)} to {show_seconds(high)}), "
        f"{run.gpu_hours:,.3g} GPU-hours, {money}",
        highlight=False,
        soft_wrap=True,
    )
    told = noticeable(found.binding)
    if told:
        console.print(f"[bold]What binds it:[/] {told[0].kind}", highlight=False)
    for b in told[:5]:
        console.print(f"  {b.kind}: {b.text}", highlight=False, soft_wrap=True)
    prediction = plan.prediction
    console.print(
        f"[bold]Provenance:[/] {prediction.provenance}, "
        f"calibration {prediction.calibration_id or 'none'}",
        highlight=False,
    )
