"""`flopwright explain`: why a plan is as it is, and answers to questions about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flopwright.cli._scenario import SET_HELP, scenario_of

if TYPE_CHECKING:
    from rich.console import Console

    from flopwright.planner.questions.answer import Answer
    from flopwright.planner.questions.explained import Explanation


def explain(
    scenario: Annotated[str, typer.Argument(help="Scenario file, or one that ships by name.")],
    changes: Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="Plan file; default: the best plan found.")
    ] = None,
    question: Annotated[
        list[str] | None,
        typer.Option("--question", help="Only answer this; may be repeated. Listed by --all."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Answer every question too.")] = False,
    calibration: Annotated[
        str | None, typer.Option("--calibration", help="Path or id, instead of a stack.")
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option("--stack", help="Software that runs it; default: as the scenario says."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain a plan: what binds it, what its neighbours lack or lose, what more would buy.

    Each question is answered by pricing other plans: which micro-batch, how long a
    sequence, which recompute policy, when hybrid sharding, and so on.

    Example: flopwright explain kimi_k2_mini_2cpu_fp32 --question best_batch
    """
    from flopwright.cli._console import console_of
    from flopwright.cli._given_plan import check_model
    from flopwright.cli._priced_by import priced_by
    from flopwright.planner.questions.explained import explain as explained
    from flopwright.planner.questions.explained import plan_of
    from flopwright.planner.questions.registry import QUESTIONS
    from flopwright.planner.questions.registry import question as asked
    from flopwright.spec.load import load_plan

    names = list(QUESTIONS) if every else list(dict.fromkeys(question or []))
    questions = [asked(name) for name in names]
    setting = scenario_of(scenario, changes)
    given = None
    if plan is not None:
        plan_file = load_plan(plan)
        check_model(plan, plan_file, scenario, setting)
        given = plan_file.parallel
    known = priced_by(setting, calibration, stack)
    parallel, result = plan_of(setting, given, known)
    whole = explained(setting, parallel, known, result) if every or not questions else None
    answers = [q.answer(setting, parallel, known) for q in questions]
    if as_json:
        data = {
            "scenario": setting.name,
            "plan": parallel.to_data(),
            "calibration_id": known.id,
            "explanation": None if whole is None else whole.to_data(),
            "answers": [a.to_data() for a in answers],
        }
        typer.echo(json.dumps(data))
        return
    console = console_of(110)
    console.print(f"[bold]{setting.name}[/]  {parallel.label()}", highlight=False)
    if whole is not None:
        _show(console, whole)
    for answer in answers:
        words = QUESTIONS[answer.question].words
        console.print(f"[bold]{words}[/] ({answer.question})", highlight=False)
        _line(console, answer)


def _line(console: Console, answer: Answer) -> None:
    console.print(f"  {answer.text}", highlight=False, soft_wrap=True, markup=False)


def _show(console: Console, whole: Explanation) -> None:
    from flopwright.planner.explain import noticeable
    from flopwright.units import show_percent, show_seconds

    def line(text: str) -> None:
        console.print(f"  {text}", highlight=False, soft_wrap=True, markup=False)

    def title(text: str) -> None:
        console.print(f"[bold]{text}[/]", highlight=False)

    console.print(whole.verdict_text, highlight=False, soft_wrap=True, markup=False)
    console.print(f"{show_seconds(whole.step_time_s)} a step", highlight=False)
    title("What binds it")
    for bound in noticeable(whole.binding)[:5]:
        line(f"{bound.kind}: {bound.text}")
    title("Plans one choice away")
    for neighbour in whole.neighbours:
        line(f"{neighbour.change}: {neighbour.text}")
    title("What more would buy")
    for faster in whole.faster:
        name = f"{faster.role} ({faster.name})" if faster.name else faster.role
        line(f"{name} 10 % faster: {show_percent(faster.gain)} off the step")
    for bought in whole.purchases:
        line(f"{bought.what}{' more' if bought.kind == 'memory' else ''}: {bought.text}")
