"""`flopwright plan`: search the best plans of a scenario."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flopwright.cli._plan_written import check_target, go_on, write_plan
from flopwright.cli._scenario import SET_HELP, scenario_of

if TYPE_CHECKING:
    from flopwright.planner.result import RankedPlan, SearchResult
    from flopwright.planner.search import Progress
    from flopwright.spec.scenario import Scenario

EXIT_DOES_NOT_FIT = 1
_FIX = "Fix a field"
_PHASES = "Phases of a run"


def plan(
    scenario: Annotated[str, typer.Argument(help="Scenario file, or one that ships by name.")],
    changes: Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the chosen plan here (plan.yaml).")
    ] = None,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Which plan is chosen.")] = 1,
    top: Annotated[int, typer.Option("--top", min=1, max=100, help="Plans to list.")] = 10,
    calibration: Annotated[
        str | None, typer.Option("--calibration", help="Path or id, instead of a stack.")
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option(
            "--stack", help="Software that runs it, e.g. nemo-2025; prior: the GPU's prior alone."
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also",
            help="Where this plan stands too: a plan.yaml, or 'pp=16 ep=16 zero=1 mbs=1'.",
        ),
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Where the published plan of the scenario stands.")
    ] = False,
    refine: Annotated[
        bool, typer.Option("--refine/--no-refine", help="Send the best through the event engine.")
    ] = True,
    tp: Annotated[int | None, typer.Option(rich_help_panel=_FIX)] = None,
    pp: Annotated[int | None, typer.Option(rich_help_panel=_FIX)] = None,
    vpp: Annotated[int | None, typer.Option(rich_help_panel=_FIX)] = None,
    cp: Annotated[int | None, typer.Option(rich_help_panel=_FIX)] = None,
    ep: Annotated[int | None, typer.Option(rich_help_panel=_FIX)] = None,
    dp: Annotated[int | None, typer.Option(rich_help_panel=_FIX)] = None,
    zero: Annotated[int | None, typer.Option(rich_help_panel=_FIX)] = None,
    micro_batch_size: Annotated[int | None, typer.Option(rich_help_panel=_FIX)] = None,
    recompute: Annotated[str | None, typer.Option(rich_help_panel=_FIX)] = None,
    schedule: Annotated[str | None, typer.Option(rich_help_panel=_FIX)] = None,
    fp8_activations: Annotated[
        bool | None, typer.Option("--fp8-activations/--no-fp8-activations", rich_help_panel=_FIX)
    ] = None,
    activation_offload: Annotated[
        bool | None,
        typer.Option("--activation-offload/--no-activation-offload", rich_help_panel=_FIX),
    ] = None,
    optimizer_offload: Annotated[
        bool | None,
        typer.Option("--optimizer-offload/--no-optimizer-offload", rich_help_panel=_FIX),
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option("--fix", help="Any other field, e.g. etp=2.", rich_help_panel=_FIX),
    ] = None,
    whole_run: Annotated[
        bool,
        typer.Option(
            "--whole-run",
            help="Plan every phase; what the whole run takes.",
            rich_help_panel=_PHASES,
        ),
    ] = False,
    restart: Annotated[
        str | None,
        typer.Option(
            help="Time between two phases of different splits, e.g. 20min.",
            rich_help_panel=_PHASES,
        ),
    ] = None,
    phase: Annotated[
        str | None,
        typer.Option(help="Plan this phase of the scenario.", rich_help_panel=_PHASES),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Search every plan of a scenario: does it fit, how fast, how dear, and what binds it.

    Exit code 0: something fits. 1: nothing fits; the nearest plans are shown with what
    they lack, and no plan is written. 2: the input cannot be used.

    Example: flopwright plan kimi_k2_pretrain_2048gpu_h800_bf16 --published --out plan.yaml
    """
    fixed = {
        "tp": tp,
        "pp": pp,
        "vpp": vpp,
        "cp": cp,
        "ep": ep,
        "dp": dp,
        "zero_stage": zero,
        "micro_batch_size": micro_batch_size,
        "recompute": recompute,
        "schedule": schedule,
        "fp8_activations": fp8_activations,
        "activation_offload": activation_offload,
        "optimizer_offload": optimizer_offload,
    }
    given = {name: value for name, value in fixed.items() if value is not None}
    given |= fixed_fields(fix or ())
    _check_phases(given, phase, restart, whole_run=whole_run, ranked=rank > 1)
    if whole_run:
        setting = scenario_of(scenario, changes)
        _plan_phases(setting, out, (calibration, stack), restart, as_json)
        return
    asked = Asked(
        scenario=scenario,
        changes=tuple(changes or ()),
        phase=phase,
        out=out,
        rank=rank,
        top=max(top, rank),
        priced_by=(calibration, stack),
        fixed=given,
        also=tuple(also or ()),
        published=published,
        refine=refine,
        as_json=as_json,
    )
    _run(asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line asks of one search; priced_by is (calibration, stack)."""

    scenario: str
    changes: tuple[str, ...]
    phase: str | None
    out: Path | None
    rank: int
    top: int
    priced_by: tuple[str | None, str | None]
    fixed: dict[str, int | str | bool]
    also: tuple[str, ...]
    published: bool
    refine: bool
    as_json: bool


def fixed_fields(words: Sequence[str]) -> dict[str, int | str | bool]:
    """Returns `name=value` words as fixed fields: numbers, true and false, else text.

    Raises:
        InputError: a word without a value.
    """
    from flopwright.errors import InputError, Violation

    out: dict[str, int | str | bool] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            rule = "needs a value"
            raise InputError(Violation(field="--fix", value=word, rule=rule, nearest_fix="etp=2"))
        truth = {"true": True, "false": False}
        number = value.removeprefix("-").isdigit()
        out[name] = int(value) if number else truth.get(value, value)
    return out


def _check_phases(
    fixed: dict[str, int | str | bool],
    phase: str | None,
    restart: str | None,
    *,
    whole_run: bool,
    ranked: bool,
) -> None:
    """Refuses options that a whole run, or one phase, has no use for."""
    from flopwright.errors import InputError, Violation

    found = []
    if restart is not None and not whole_run:
        found.append(Violation(field="--restart", rule="goes with --whole-run only"))
    given = [*fixed, *(["phase"] if phase is not None else []), *(["rank"] if ranked else [])]
    if whole_run and given:
        rule = "each phase has a search of its own"
        fix = "leave it out, or plan one phase with --phase"
        found += [Violation(field=name, rule=rule, nearest_fix=fix) for name in given]
    if found:
        raise InputError(found)


def _plan_phases(
    scenario: Scenario,
    out: Path | None,
    options: tuple[str | None, str | None],
    restart: str | None,
    as_json: bool,
) -> None:
    from flopwright.cli._priced_by import priced_by
    from flopwright.cli._whole_run_view import plan_whole_run

    check_target(out)
    calibration = priced_by(scenario, *options)
    plan_whole_run(scenario, calibration, restart=restart, out=out, as_json=as_json)


def _run(asked: Asked) -> None:
    from flopwright.cli import _plan_view as view
    from flopwright.cli._console import console_of
    from flopwright.cli._priced_by import priced_by
    from flopwright.cli._standing_view import show_standings, standings
    from flopwright.plan.phases import phase_of
    from flopwright.planner.explain import binding_constraint
    from flopwright.planner.recipes import with_gemm
    from flopwright.planner.whole_run import whole_run

    scenario, out = scenario_of(asked.scenario, asked.changes), asked.out
    if asked.phase is not None:
        scenario = phase_of(scenario, asked.phase).scenario
    check_target(out)
    result = _search(scenario, asked)
    chosen = _choose(result, asked.rank)
    own = scenario if chosen is None else with_gemm(scenario, chosen.gemm)
    calibration = priced_by(own, *asked.priced_by)
    run = None if chosen is None else whole_run(own, chosen.prediction)
    binding = binding_constraint(result, own, calibration)
    stood = standings(scenario, calibration, asked.also, published=asked.published)
    if chosen is not None and out is not None:
        write_plan(own, chosen, out)
    if asked.as_json:
        written = str(out) if out is not None and chosen is not None else None
        data = view.as_data(result, own, chosen, run, binding, written)
        data["also"] = [s.to_data() for s in stood]
        typer.echo(json.dumps(data))
    else:
        console = console_of(140)
        view.show(console, result, own, chosen, run, binding)
        show_standings(console, scenario, stood)
        go_on(asked.scenario, asked.changes, asked.fixed, out, fits=chosen is not None)
    if chosen is None:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _search(scenario: Scenario, asked: Asked) -> SearchResult:
    from rich.console import Console
    from rich.progress import Progress as Bar

    from flopwright.cli._priced_by import priced_by
    from flopwright.planner.search import search

    console = Console(stderr=True)
    with Bar(
        console=console, transient=True, disable=asked.as_json or not console.is_terminal
    ) as bar:
        task = bar.add_task("pricing plans", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        progress: Progress = advance
        return search(
            scenario,
            lambda variant: priced_by(variant, *asked.priced_by),
            asked.top,
            fixed=asked.fixed,
            progress=progress,
            refine=asked.refine,
        )


def _choose(result: SearchResult, rank: int) -> RankedPlan | None:
    from flopwright.errors import InputError, Violation

    if not result.ranked:
        return None
    if rank > len(result.ranked):
        raise InputError(
            Violation(
                field="rank",
                value=str(rank),
                rule="there are fewer plans that fit",
                limit=str(len(result.ranked)),
            )
        )
    return result.ranked[rank - 1]
