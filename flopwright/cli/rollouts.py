"""`flopwright rollouts`: rollout rounds on the event engine, and the best lambda."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from flopwright.errors import InputError, Violation

_SWEEP_JSON_LEAVES_OUT = ("rounds", "completion_curve", "assumptions")


def rollouts(
    scenario: Annotated[
        str, typer.Argument(help="Rollout scenario: a YAML file or the name of one that ships.")
    ],
    stop_fraction: Annotated[
        float | None,
        typer.Option("--lambda", help="Share of the attempts in flight that ends a round."),
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Also find the best lambda.")] = False,
    max_staleness: Annotated[
        float | None,
        typer.Option(help="With --sweep: bound on the mean policy versions behind.", min=0),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds kept, after the warm-up.", min=1, max=10_000)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the lengths.", min=0)] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate RL rollout rounds and find the best lambda.

    Prints the mean steady round: time by phase, idle share, tail, staleness and KV peak;
    with --sweep also throughput and staleness over lambda, and what the best lambda trades.

    Example: flopwright rollouts small_exponential_1gpu --sweep --png rounds.png
    """
    from flopwright.cli._targets import check_file
    from flopwright.simulator.rollouts.rounds import simulate
    from flopwright.simulator.rollouts.sweep import sweep_lambda
    from flopwright.spec.rollout import load_rollout_scenario, with_stop_fraction

    check_file("--png", png, ".png", "the picture is a PNG")
    if png is not None and not png.parent.is_dir():
        rule = f"no such folder: {png.parent}"
        raise InputError(Violation(field="--png", value=str(png), rule=rule))
    if max_staleness is not None and not (sweep and max_staleness < math.inf):
        raise InputError(_staleness_rule(max_staleness, sweep=sweep))
    spec = load_rollout_scenario(scenario)
    if stop_fraction is not None:
        spec = with_stop_fraction(spec, stop_fraction)
    with _progress("rounds", as_json) as advance:
        report = simulate(spec, rounds, seed, advance)
    found = None
    if sweep:
        with _progress("lambdas", as_json) as advance:
            found = sweep_lambda(spec, None, rounds, seed, max_staleness, advance)
    if png is not None:
        from flopwright.simulator.calibration.files import write_atomically
        from flopwright.simulator.rollouts.figure import round_png

        write_atomically(png, round_png(report, found))
    if as_json:
        typer.echo(json.dumps(_data(report, found)))
        return
    from flopwright.simulator.rollouts.text import assumption_lines, report_lines, sweep_lines

    lines = report_lines(report) + (["", *sweep_lines(found)] if found is not None else [])
    lines += ["", "assumed:", *(f"  {text}" for text in assumption_lines(report))]
    typer.echo("\n".join(lines))
    if png is not None:
        typer.echo(f"\nwrote {png}")


def _data(report: Any, sweep: Any) -> dict[str, Any]:
    """Returns the result as plain data; a sweep's points without their single rounds."""
    out: dict[str, Any] = {"report": report.to_data(), "sweep": None}
    if sweep is not None:
        data = sweep.to_data()
        for point in data["points"]:
            for key in _SWEEP_JSON_LEAVES_OUT:
                point.pop(key)
        data["best_lambda"] = sweep.best_point.stop_fraction
        data["calmest_lambda"] = sweep.calmest_point.stop_fraction
        out["sweep"] = data
    return out


@contextmanager
def _progress(what: str, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Yields a callback that moves a bar on stderr; nothing is drawn where no person looks."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _staleness_rule(value: float, *, sweep: bool) -> Violation:
    if sweep:
        rule, fix = "must be a finite number", "leave it out for no bound"
    else:
        rule, fix = "bounds the lambdas of a sweep, and none was asked for", "add --sweep"
    return Violation(field="--max-staleness", value=f"{value:g}", rule=rule, nearest_fix=fix)
