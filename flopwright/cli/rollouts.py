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
    search: Annotated[
        bool,
        typer.Option(
            "--search", help="Plan the loop; done anyway for a scenario of kind rl_loop."
        ),
    ] = False,
    time_limit: Annotated[
        float | None,
        typer.Option(help="With a search: seconds after which nothing more is tried.", min=0),
    ] = None,
    top: Annotated[int, typer.Option(help="With a search: loops to list.", min=1, max=100)] = 5,
    out: Annotated[
        Path | None, typer.Option("--out", help="With a search: write the best plan here (.yaml).")
    ] = None,
    campaign: Annotated[
        bool,
        typer.Option(
            "--campaign", help="Lengths that grow: fixed concurrency against the throttle."
        ),
    ] = False,
    growth: Annotated[
        float | None,
        typer.Option(help="With --campaign: lengths of the last round over the first (8)."),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write one round as a Chrome trace (.json or .json.gz)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate RL rollout rounds, find the best lambda, or plan the whole loop.

    Prints the mean steady round: time by phase, idle share, tail, staleness and KV peak;
    with --sweep also throughput and staleness over lambda, and what the best lambda trades.
    With --search (and for a scenario of kind rl_loop) it plans: which GPUs generate, on
    which instances, with how many attempts at once, when a round ends, how the update is
    split, and what lies where; exit code 1 where nothing fits.

    Example: flopwright rollouts small_exponential_1gpu --sweep --png rounds.png
    """
    from flopwright.cli._loop import (
        check_growth,
        logged_round,
        plan_loop,
        run_campaign,
        write_trace,
    )
    from flopwright.simulator.rollouts.rounds import simulate
    from flopwright.simulator.rollouts.sweep import sweep_lambda
    from flopwright.spec.loop import at_stop_fraction, is_loop, load_loop_scenario
    from flopwright.spec.rollout import load_rollout_scenario, with_stop_fraction

    _check_files(png, out, trace)
    check_growth(growth, campaign=campaign)
    if max_staleness is not None and not (sweep and max_staleness < math.inf):
        raise InputError(_staleness_rule(max_staleness, sweep=sweep))
    if search or is_loop(scenario):
        loop = load_loop_scenario(scenario)
        if stop_fraction is not None:
            loop = at_stop_fraction(loop, stop_fraction)
        plan_loop(
            loop,
            rounds=rounds,
            seed=seed,
            time_limit_s=time_limit,
            top=top,
            out=out,
            png=png,
            trace=trace,
            as_json=as_json,
            progress=_progress,
        )
        return
    _only_with_search(time_limit, out)
    spec = load_rollout_scenario(scenario)
    if stop_fraction is not None:
        spec = with_stop_fraction(spec, stop_fraction)
    if campaign:
        run_campaign(
            spec,
            rounds=rounds,
            growth=8.0 if growth is None else growth,
            seed=seed,
            png=png,
            as_json=as_json,
            progress=_progress,
        )
        return
    with _progress("rounds", as_json) as advance:
        report = simulate(spec, rounds, seed, advance)
    found = None
    if sweep:
        with _progress("lambdas", as_json) as advance:
            found = sweep_lambda(spec, None, rounds, seed, max_staleness, advance)
    if png is not None or trace is not None:
        from flopwright.simulator.calibration.files import write_atomically
        from flopwright.simulator.rollouts.figure import round_png

        record = logged_round(spec, report.seed)
        if png is not None:
            picture = round_png(report, found, record, spec.kv_capacity_tokens)
            write_atomically(png, picture)
        if trace is not None:
            write_trace(trace, spec, record)
    if as_json:
        typer.echo(json.dumps(_data(report, found)))
        return
    from flopwright.simulator.rollouts.text import assumption_lines, report_lines, sweep_lines

    lines = report_lines(report) + (["", *sweep_lines(found)] if found is not None else [])
    lines += ["", "assumed:", *(f"  {text}" for text in assumption_lines(report))]
    typer.echo("\n".join(lines))
    for path in (png, trace):
        if path is not None:
            typer.echo(f"\nwrote {path}")


def _check_files(png: Path | None, out: Path | None, trace: Path | None) -> None:
    from flopwright.cli._targets import check_file

    check_file("--png", png, ".png", "the picture is a PNG")
    check_file("--out", out, ".yaml", "the plan is YAML")
    if trace is not None and not trace.name.endswith((".json", ".json.gz")):
        fix = f"write {trace.with_suffix('.json')}" if trace.name else ""
        raise InputError(
            Violation(
                field="--trace", value=str(trace), rule="a Chrome trace is JSON", nearest_fix=fix
            )
        )
    for flag, path in (("--png", png), ("--out", out), ("--trace", trace)):
        if path is not None and not path.parent.is_dir():
            rule = f"no such folder: {path.parent}"
            raise InputError(Violation(field=flag, value=str(path), rule=rule))


def _only_with_search(time_limit: float | None, out: Path | None) -> None:
    for flag, value in (("--time-limit", time_limit), ("--out", out)):
        if value is not None:
            rule = "belongs to a search, and none was asked for"
            raise InputError(
                Violation(field=flag, value=str(value), rule=rule, nearest_fix="add --search")
            )


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
