"""`flopwright tournament`: how good the planner's choice is, by running plans for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flopwright.cli._run_options import (
    AsJson,
    NoStore,
    Nproc,
    ProbeSeconds,
    StoreUrl,
    Text,
    Tokenizer,
)


def tournament(
    scenario: Annotated[str, typer.Argument(help="Scenario file, or one that ships by name.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the tournament; an unfinished one goes on."),
    ] = None,
    budget: Annotated[
        float, typer.Option("--budget", min=10, help="Seconds for everything that runs.")
    ] = 240.0,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds of running that each plan may use.")
    ] = 60.0,
    top: Annotated[
        int, typer.Option("--top", min=1, max=64, help="Best plans of the search that run.")
    ] = 6,
    random: Annotated[
        int, typer.Option("--random", min=0, max=64, help="Plans that are drawn and run too.")
    ] = 6,
    calibration: Annotated[
        str | None,
        typer.Option("--calibration", help="Choose with this one; default: learn one first."),
    ] = None,
    probe_seconds: ProbeSeconds = 30.0,
    steps_per_turn: Annotated[
        int, typer.Option("--steps-per-turn", min=1, help="Steps of a plan before the next.")
    ] = 2,
    nproc: Nproc = None,
    text: Text = None,
    tokenizer: Tokenizer = "bpe",
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Of the draw, the weights and the data.")
    ] = 0,
    store: StoreUrl = None,
    no_store: NoStore = False,
    as_json: AsJson = False,
) -> None:
    """Run the planner's best and some random plans for real, and rank its choice among them.

    First random plans run beside a probe of the machine, and a calibration is learnt from
    both. The planner then chooses, judging no plan by its own run, and its best plans race
    against the random ones in short turns; slow ones leave early. Every trial goes to the
    store, where `calibrate` learns from it. Ctrl-C ends the round that is running and keeps
    what was found; the same command with the same --out goes on from there.

    Example: flopwright tournament llama_mini_2cpu_fp32 --budget 180 --out runs/tournament
    """
    from flopwright.cli._tournament_parts import Options
    from flopwright.cli._tournament_run import run_tournament
    from flopwright.cli._tournament_view import result_data, show
    from flopwright.executor.launch.local import RunFailedError

    options = Options(
        budget_s=budget,
        timeout_s=timeout,
        top=top,
        random=random,
        calibration=calibration,
        probe_s=probe_seconds,
        steps_per_turn=steps_per_turn,
        nproc=nproc,
        text=text,
        tokenizer=tokenizer,
        seed=seed,
        store=None if no_store else store or "",
    )
    folder = out or Path("runs") / f"tournament-{Path(scenario).stem}"
    try:
        outcome = run_tournament(scenario, folder, options, quiet=as_json)
    except RunFailedError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo(f"ended; the same command with --out {folder} goes on", err=True)
        raise typer.Exit(130) from None
    if outcome.result is not None:
        if as_json:
            typer.echo(json.dumps(result_data(outcome)))
        else:
            show(outcome)
    elif outcome.finished:
        typer.echo(f"no result: the planner's choice could not be timed; see {folder}", err=True)
        raise typer.Exit(1)
    if not outcome.finished:
        typer.echo(f"stopped; the same command with --out {folder} goes on", err=True)
        raise typer.Exit(130)
