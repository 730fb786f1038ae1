"""`flopwright simulate`: one plan's step in simulated time, rank by rank."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flopwright.cli._scenario import SET_HELP, scenario_of

if TYPE_CHECKING:
    from flopwright.plan.parallel import ParallelPlan
    from flopwright.report.trace import Trace

MAX_SAMPLES = 10_000


class EngineChoice(StrEnum):
    """How the step is simulated."""

    REPLAY = "replay"
    EVENTS = "events"


def simulate(
    scenario: Annotated[str, typer.Argument(help="Scenario file, or one that ships by name.")],
    plan: Annotated[Path, typer.Option("--plan", help="Plan file (flopwright plan --out).")],
    changes: Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)] = None,
    engine: Annotated[
        EngineChoice,
        typer.Option("--engine", help="events: transfers share links; replay: the longest path."),
    ] = EngineChoice.EVENTS,
    jitter: Annotated[
        float, typer.Option("--jitter", help="Spread of each action's time, such as 0.05.")
    ] = 0.0,
    straggler: Annotated[
        list[str] | None,
        typer.Option("--straggler", help="RANK=FACTOR on what a GPU computes; may be repeated."),
    ] = None,
    slow_link: Annotated[
        list[str] | None,
        typer.Option(
            "--slow-link",
            help="RANK=FACTOR on what a GPU sends to other stages and replicas; may be repeated.",
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=1, max=MAX_SAMPLES, help="Steps to draw jitter for.")
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the jitter.")] = 0,
    private_links: Annotated[
        bool, typer.Option("--private-links", help="Give every transfer links of its own.")
    ] = False,
    calibration: Annotated[
        str | None, typer.Option("--calibration", help="Path or id, instead of a stack.")
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option("--stack", help="Software that runs it; prior: the GPU's prior alone."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="NAME.json or NAME.json.gz: one file for Perfetto. Another name: a folder with "
            "a file a rank, for Holistic Trace Analysis.",
        ),
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw the timeline here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate one step of a plan: time by class, bubble, memory and what peaks it.

    Without jitter, stragglers or slow links, replicas that are alike are simulated once.

    Example: flopwright simulate kimi_k2_pretrain_2048gpu_h800_bf16 --plan plan.yaml --trace t.json
    """
    from flopwright.cli import _simulate_view as view
    from flopwright.cli._console import console_of
    from flopwright.cli._given_plan import check_model
    from flopwright.cli._priced_by import priced_by
    from flopwright.cli._targets import check_file
    from flopwright.simulator.calibration.files import write_atomically
    from flopwright.simulator.engine.perturb import Perturbation
    from flopwright.simulator.engine.simulate import simulate as run
    from flopwright.spec.load import load_plan

    check_file("--png", png, ".png", "the picture is a PNG")
    _check_trace(trace)
    setting = scenario_of(scenario, changes)
    plan_file = load_plan(plan)
    check_model(plan, plan_file, scenario, setting)
    parallel = plan_file.parallel
    known = priced_by(setting, calibration, stack)
    step = run(
        setting,
        parallel,
        known,
        engine=engine.value,
        perturbation=Perturbation(
            jitter=jitter,
            stragglers=_factors("--straggler", straggler or []),
            slow_links=_factors("--slow-link", slow_link or []),
            seed=seed,
        ),
        samples=samples,
        contention=not private_links,
    )
    picture = b""
    if png is not None:
        from flopwright.report.timeline_png import timeline_png

        title = f"{setting.name}: {parallel.label()}"
        picture = timeline_png(step.trace, step.step_time_s, title)
    if trace is not None:
        _write_trace(trace, step.trace, parallel)
    if png is not None:
        write_atomically(png, picture)
    if as_json:
        typer.echo(json.dumps(view.as_data(setting, parallel, known.id, step)))
        return
    view.show(console_of(110), setting, parallel, step)
    for path in (png, trace):
        if path is not None:
            typer.echo(f"written: {path}")


def _factors(flag: str, texts: list[str]) -> dict[int, float]:
    """Returns factors by rank from texts such as "12=1.5"."""
    from flopwright.errors import InputError, Violation

    out: dict[int, float] = {}
    broken = []
    for text in texts:
        rank, _, factor = text.partition("=")
        try:
            of = int(rank)
            if of in out:
                rule, fix = f"rank {of} has a factor already", "give each rank one"
                broken.append(Violation(field=flag, value=text, rule=rule, nearest_fix=fix))
            out[of] = float(factor)
        except ValueError:
            fix = "write RANK=FACTOR, such as 12=1.5"
            rule = "is no rank and factor"
            broken.append(Violation(field=flag, value=text, rule=rule, nearest_fix=fix))
    if broken:
        raise InputError(broken)
    return out


def _is_file(trace: Path) -> bool:
    return trace.name.endswith((".json", ".json.gz"))


def _check_trace(trace: Path | None) -> None:
    """Refuses a trace that could not be written, before any work is done."""
    from flopwright.cli._targets import check_file
    from flopwright.errors import InputError, Violation

    if trace is None:
        return
    if _is_file(trace):
        check_file("--trace", trace, trace.suffix, "a trace is JSON")
    elif trace.is_file() or trace.suffix:
        raise InputError(
            Violation(
                field="--trace",
                value=str(trace),
                rule="a file's name ends in .json or .json.gz, a folder's has no ending",
                nearest_fix=f"write {trace.with_suffix('.json')}",
            )
        )
    else:
        _check_empty(trace)


def _check_empty(folder: Path) -> None:
    from flopwright.errors import InputError, Violation
    from flopwright.planner.export.folder import check_folder

    try:
        check_folder(folder, ())
    except InputError as error:
        rules = ", ".join(v.rule for v in error.violations)
        fix = "name a new folder"
        raise InputError(
            Violation(field="--trace", value=str(folder), rule=rules, nearest_fix=fix)
        ) from error


def _write_trace(path: Path, trace: Trace, plan: ParallelPlan) -> None:
    from flopwright.planner.export.folder import write_folder
    from flopwright.report.trace import chrome_trace, kineto_traces, trace_bytes
    from flopwright.simulator.calibration.files import write_atomically

    if _is_file(path):
        data = chrome_trace(trace, world_size=plan.world_size)
        write_atomically(path, trace_bytes(data, zipped=path.suffix == ".gz"))
        return
    ranks = kineto_traces(trace, world_size=plan.world_size)
    write_folder(
        path,
        {f"rank-{rank}.json.gz": trace_bytes(data, zipped=True) for rank, data in ranks.items()},
    )
