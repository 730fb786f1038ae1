"""`flopwright rollouts`: rollout rounds on the event engine, the best lambda, the best loop."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from flopwright.cli import _rollout_options as options
from flopwright.errors import InputError, Violation

if TYPE_CHECKING:
    from flopwright.spec.rollout import RolloutScenario

_SWEEP_JSON_LEAVES_OUT = ("rounds", "completion_curve", "assumptions")


def rollouts(
    scenario: options.Name,
    changes: options.Changes = None,
    stop_fraction: options.Fraction = None,
    sweep: options.Sweep = False,
    max_staleness: options.MaxStaleness = None,
    rounds: options.Rounds = None,
    seed: options.Seed = None,
    search: options.Search = False,
    time_limit: options.TimeLimit = None,
    top: options.Top = None,
    out: options.Out = None,
    campaign: options.Campaign = False,
    growth: options.Growth = None,
    png: options.Png = None,
    trace: options.Trace = None,
    as_json: options.Json = False,
) -> None:
    """Simulate RL rollout rounds, find the best lambda, or plan the whole loop.

    Prints the mean steady round: time by phase, idle share, tail, staleness and KV peak;
    with --sweep also throughput and staleness over lambda, and what the best lambda trades.
    With --search (and for a scenario of kind rl_loop) it plans: which GPUs generate, on
    which instances, with how many attempts at once, when a round ends, how the update is
    split, and what lies where; exit code 1 where nothing fits.

    Example: flopwright rollouts small_exponential_1gpu --sweep --png rounds.png
    """
    from flopwright.cli import _loop
    from flopwright.spec.loop import is_loop_document, open_scenario

    files = options.Targets(png, out, trace)
    files.check()
    document = open_scenario(scenario, changes or ())
    plans = search or is_loop_document(document)
    options.check_together(
        {
            "--sweep": (
                sweep,
                not plans and not campaign,
                "leave it out: the search tries lambdas",
            ),
            "--campaign": (
                campaign,
                not plans,
                "leave it out, or name a scenario of kind rollout",
            ),
            "--max-staleness": (max_staleness, sweep or plans, "add --sweep"),
            "--time-limit": (time_limit, plans, "add --search"),
            "--out": (out, plans, "add --search"),
            "--top": (top, plans, "add --search"),
            "--growth": (growth, campaign, "add --campaign"),
            "--trace": (trace, not campaign, "leave --campaign out"),
        }
    )
    _check_numbers(max_staleness, growth)
    kept = _loop.Asked(rounds, seed, as_json, _progress)
    if plans:
        loop = _loop.loop_asked(document, stop_fraction, max_staleness)
        limit_s = options.LOOP_TIME_LIMIT_S if time_limit is None else time_limit
        listed = options.LOOPS_LISTED if top is None else top
        _loop.plan_loop(loop, kept, files, time_limit_s=limit_s, top=listed)
        return
    spec = _loop.round_asked(document, stop_fraction)
    if campaign:
        _loop.run_campaign(spec, kept, png, growth=8.0 if growth is None else growth)
    else:
        _rounds(spec, kept, files, sweep=sweep, max_staleness=max_staleness)


def _rounds(
    spec: RolloutScenario,
    asked: Any,
    files: options.Targets,
    *,
    sweep: bool,
    max_staleness: float | None,
) -> None:
    """Simulates rounds, prints them and writes the files asked for."""
    from flopwright.simulator.rollouts.rounds import simulate
    from flopwright.simulator.rollouts.sweep import sweep_lambda
    from flopwright.simulator.rollouts.text import assumption_lines, report_lines, sweep_lines

    with _progress("rounds", asked.as_json) as advance:
        report = simulate(spec, asked.rounds, asked.seed, advance)
    found = None
    if sweep:
        with _progress("lambdas", asked.as_json) as advance:
            found = sweep_lambda(spec, None, asked.rounds, asked.seed, max_staleness, advance)
    _write_round(spec, report, found, files)
    if asked.as_json:
        typer.echo(json.dumps(_data(report, found)))
        return
    lines = report_lines(report) + (["", *sweep_lines(found)] if found is not None else [])
    lines += ["", "assumed:", *(f"  {text}" for text in assumption_lines(report))]
    typer.echo("\n".join(lines))
    for path in (files.png, files.trace):
        if path is not None:
            typer.echo(f"\nwrote {path}")


def _write_round(spec: RolloutScenario, report: Any, found: Any, files: options.Targets) -> None:
    if files.png is None and files.trace is None:
        return
    from flopwright.cli._loop import logged_round, write_trace
    from flopwright.simulator.calibration.files import write_atomically
    from flopwright.simulator.rollouts.figure import round_png

    record = logged_round(spec, report.seed)
    if files.png is not None:
        picture = round_png(report, found, record, spec.kv_capacity_tokens)
        write_atomically(files.png, picture)
    if files.trace is not None:
        write_trace(files.trace, spec, record)


def _check_numbers(max_staleness: float | None, growth: float | None) -> None:
    found = []
    if max_staleness is not None and not max_staleness < math.inf:
        rule, fix = "must be a finite number", "leave it out for no bound"
        value = f"{max_staleness:g}"
        found.append(Violation(field="--max-staleness", value=value, rule=rule, nearest_fix=fix))
    if growth is not None and not 0.01 <= growth <= 1000:
        rule, fix = "must be between 0.01 and 1000", "8 for lengths that grow eightfold"
        found.append(Violation(field="--growth", value=f"{growth:g}", rule=rule, nearest_fix=fix))
    if found:
        raise InputError(found)


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
