"""`flopwright recommend`: fewest GPUs, longest context, largest model, compute-optimal size."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flopwright.cli._scenario import SET_HELP, scenario_of

if TYPE_CHECKING:
    from flopwright.errors import Violation
    from flopwright.planner.recommend_answer import Means, Recommendation
    from flopwright.planner.recommend_sizes import Goal
    from flopwright.spec.scenario import Scenario

EXIT_NOTHING_FOUND = 1
_QUESTION = "The question (one; a deadline and a budget go together)"
_SERVING = "Of --serve"
_GPU_TIME: Final = {"GPU-days": 1.0, "GPU-hours": 1 / 24, "GPU-years": 365.25}
_REFIT: Final = "refit"
_QUESTIONS: Final = (
    "--deadline", "--budget", "--longest-context", "--largest-batch", "--largest-model",
    "--compute-optimal",
)  # fmt: skip


def recommend(
    scenario: Annotated[
        str | None, typer.Argument(help="Scenario file, or one that ships by name.")
    ] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)] = None,
    deadline: Annotated[
        str | None,
        typer.Option(help="Fewest GPUs in this time, e.g. 30d.", rich_help_panel=_QUESTION),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Fewest GPUs for this money (USD), e.g. 2M.", rich_help_panel=_QUESTION),
    ] = None,
    longest_context: Annotated[
        bool, typer.Option("--longest-context", rich_help_panel=_QUESTION)
    ] = False,
    largest_batch: Annotated[
        bool,
        typer.Option("--largest-batch", help="Largest micro-batch.", rich_help_panel=_QUESTION),
    ] = False,
    largest_model: Annotated[
        bool,
        typer.Option(
            "--largest-model", help="Of the model's proportions.", rich_help_panel=_QUESTION
        ),
    ] = False,
    compute_optimal: Annotated[
        str | None,
        typer.Option(
            help="Model, data, rate, batch and vocabulary for a budget: '1e24 FLOP' or "
            "'2000 GPU-days'.",
            rich_help_panel=_QUESTION,
        ),
    ] = None,
    law: Annotated[
        str, typer.Option(help="Loss law: refit (arXiv 2404.10102) or hoffmann (2203.15556).")
    ] = _REFIT,
    max_gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Largest cluster looked at; default: 8 times the scenario's."),
    ] = None,
    sure: Annotated[
        bool, typer.Option("--sure", help="Judge by the high end of the 80 % interval.")
    ] = False,
    every_size: Annotated[
        bool, typer.Option("--every-size", help="Plan every cluster size, none by bisection.")
    ] = False,
    calibration: Annotated[
        str | None, typer.Option("--calibration", help="Path or id, instead of a stack.")
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option("--stack", help="Software that runs it; default: as the scenario says."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the recommended scenario here (YAML).")
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            help="Fewest GPUs that serve this model, and at what price; no scenario is needed.",
            rich_help_panel=_QUESTION,
        ),
    ] = None,
    node: Annotated[
        str, typer.Option(help="Node type that serves.", rich_help_panel=_SERVING)
    ] = "hgx_h200",
    release: Annotated[
        str | None,
        typer.Option(
            help="Weight format: bf16, fp8, block_fp8, int4_g32, mxfp4, nvfp4.",
            rich_help_panel=_SERVING,
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option("--kv", help="Cache: bf16 or fp8.", rich_help_panel=_SERVING)
    ] = None,
    context: Annotated[
        str, typer.Option(help="Tokens a sequence may have.", rich_help_panel=_SERVING)
    ] = "128Ki",
    concurrency: Annotated[
        int, typer.Option(min=1, help="Sequences at once.", rich_help_panel=_SERVING)
    ] = 1,
    engine: Annotated[
        str, typer.Option(help="Serving engine by name.", rich_help_panel=_SERVING)
    ] = "vllm",
    experts: Annotated[
        int,
        typer.Option(min=1, help="Models of this size behind a router.", rich_help_panel=_SERVING),
    ] = 1,
    prompt: Annotated[
        str, typer.Option(help="Prompt tokens of a task.", rich_help_panel=_SERVING)
    ] = "4000",
    effort: Annotated[
        list[str] | None,
        typer.Option(help="Output tokens of a task, e.g. high=16k.", rich_help_panel=_SERVING),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(min=0, help="USD an hour of a GPU.", rich_help_panel=_SERVING),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Answer what to buy, to train or to serve on: each answer with its prediction and reasons.

    Exit code 0: there is an answer. 1: there is none; what is missing at the nearest is
    shown. 2: the input cannot be used.

    Example: flopwright recommend kimi_k2_pretrain_2048gpu_h800_bf16 --deadline 90d
    """
    from flopwright.errors import InputError
    from flopwright.planner.recommend_sizes import Goal

    if serve is not None:
        _check_serving(scenario, deadline, budget, compute_optimal, longest_context, largest_batch)
        _serve(
            serve, (release, kv_dtype), node, engine, (context, prompt, effort or []),
            (concurrency, experts, price), as_json=as_json,
        )  # fmt: skip
        return
    if scenario is None:
        raise InputError(_violation("scenario", "", "a scenario is needed", "or --serve MODEL"))
    _one_question(
        deadline is not None or budget is not None,
        longest_context,
        largest_batch,
        largest_model,
        compute_optimal is not None,
    )
    _check_options(
        fewest=deadline is not None or budget is not None,
        optimal=compute_optimal is not None,
        of_fewest={"--max-gpus": max_gpus is not None, "--sure": sure, "--every-size": every_size},
        law=law,
    )
    goal = Goal(
        deadline_s=None if deadline is None else _seconds(deadline),
        budget_usd=None if budget is None else _usd(budget),
        sure=sure,
        max_gpus=max_gpus,
        every_size=every_size,
    )
    if compute_optimal is not None:
        ask = _optimal(compute_optimal, law)
    else:
        ask = _limit(goal, longest_context, largest_batch, largest_model)
    _run(scenario, changes, ask, (calibration, stack), out, as_json)


def _check_serving(*others: object) -> None:
    from flopwright.errors import InputError

    if any(others):
        rule = "--serve is a question of its own: neither a scenario nor another question"
        raise InputError(_violation("--serve", "", rule, "ask them apart"))


def _serve(
    model: str,
    formats: tuple[str | None, str | None],
    node: str,
    engine: str,
    texts: tuple[str, str, list[str]],
    numbers: tuple[int, int, float | None],
    *,
    as_json: bool,
) -> None:
    from flopwright.cli import _serve_view as view
    from flopwright.planner.serving.serve import EFFORTS, Asked, serve
    from flopwright.simulator.rollouts.engine.catalog import load_served, named_formats

    context, prompt, effort = texts
    concurrency, experts, price = numbers
    asked = Asked(
        node_type=node,
        engine=engine,
        context=view.tokens_of("--context", context),
        concurrency=concurrency,
        prompt_tokens=view.tokens_of("--prompt", prompt),
        efforts=view.efforts_of(effort) or dict(EFFORTS),
        usd_per_gpu_hour=price,
        models=experts,
    )
    view.show(serve(load_served(model, *named_formats(*formats)), asked), as_json=as_json)


def _limit(
    goal: Goal, context: bool, batch: bool, model: bool
) -> Callable[[Scenario, Means], Recommendation]:
    from flopwright.planner import recommend_limits as limits
    from flopwright.planner.recommend_gpus import fewest_gpus

    if context:
        return limits.longest_context
    if batch:
        return limits.largest_batch
    if model:
        return limits.largest_model
    return lambda scenario, means: fewest_gpus(scenario, goal, means)


def _optimal(text: str, law_name: str) -> Callable[[Scenario, Means], Recommendation]:
    from flopwright.errors import InputError, did_you_mean
    from flopwright.planner import laws
    from flopwright.planner.recommend_optimal import (
        compute_optimal,
        compute_optimal_for_gpu_days,
    )

    if law_name not in laws.LOSS_LAWS:
        fix = did_you_mean(law_name, laws.LOSS_LAWS)
        raise InputError(_violation("--law", law_name, "no such law", fix))
    law = laws.LOSS_LAWS[law_name]
    flops, gpu_days = _compute(text)
    if flops is not None:
        return lambda s, means: compute_optimal(s, law, means, flops=flops)
    assert gpu_days is not None
    return lambda s, means: compute_optimal_for_gpu_days(s, law, means, gpu_days=gpu_days)


def _run(
    name: str,
    changes: list[str] | None,
    ask: Callable[[Scenario, Means], Recommendation],
    named: tuple[str | None, str | None],
    out: Path | None,
    as_json: bool,
) -> None:
    from flopwright.cli import _recommend_view as view
    from flopwright.cli._console import console_of
    from flopwright.cli._priced_by import priced_by

    scenario = scenario_of(name, changes)
    _check_out(out)
    calibration = priced_by(scenario, *named)
    found = view.with_progress(lambda means: ask(scenario, means), calibration, quiet=as_json)
    if out is not None and found.scenario is not None and found.found:
        _write(found, out)
    if as_json:
        written = str(out) if out is not None and found.found else None
        typer.echo(json.dumps({"written": written, **found.to_data()}))
    else:
        view.show(console_of(140), found)
        if found.found:
            typer.echo(f"Go on: flopwright plan {out}" if out else _go_on(name))
    if not found.found:
        raise typer.Exit(EXIT_NOTHING_FOUND)


def _go_on(name: str) -> str:
    return f"Go on: flopwright recommend {name} ... --out scenario.yaml, then flopwright plan it"


def _write(found: Recommendation, out: Path) -> None:
    from flopwright.simulator.calibration.files import write_atomically
    from flopwright.spec.load import dump_yaml

    assert found.scenario is not None
    write_atomically(out, dump_yaml(found.scenario, found.answer))


def _check_out(out: Path | None) -> None:
    from flopwright.errors import InputError

    if out is None:
        return
    if out.suffix not in {".yaml", ".yml"}:
        fix = f"use {out.name}.yaml"
        raise InputError(_violation("--out", str(out), "a scenario is written as YAML", fix))
    if out.is_dir():
        raise InputError(_violation("--out", str(out), "is a folder", ""))


def _one_question(*asked: bool) -> None:
    from flopwright.errors import InputError, Violation

    if sum(asked) == 1:
        return
    rule = "ask one question" if any(asked) else "ask a question"
    fix = f"give one of {', '.join(_QUESTIONS)} (--deadline and --budget may go together)"
    raise InputError(Violation(rule=rule, nearest_fix=fix))


def _check_options(*, fewest: bool, optimal: bool, of_fewest: dict[str, bool], law: str) -> None:
    """Refuses options of another question: they would change nothing."""
    from flopwright.errors import InputError, Violation

    wrong = [name for name, given in of_fewest.items() if given and not fewest]
    found = [Violation(field=name, rule="goes with --deadline or --budget only") for name in wrong]
    if law != _REFIT and not optimal:
        found.append(Violation(field="--law", value=law, rule="goes with --compute-optimal only"))
    if found:
        raise InputError(found)


def _violation(field: str, value: str, rule: str, fix: str) -> Violation:
    from flopwright.errors import Violation

    return Violation(field=field, value=value, rule=rule, nearest_fix=fix)


def _seconds(text: str) -> float:
    from flopwright.errors import InputError
    from flopwright.units import parse_quantity

    try:
        seconds = parse_quantity(text, "seconds")
    except ValueError as error:
        fix = "write it like 30d, 12h or 90min"
        raise InputError(_violation("--deadline", text, str(error), fix)) from error
    return _positive("--deadline", text, seconds)


def _usd(text: str) -> float:
    from flopwright.errors import InputError
    from flopwright.units import parse_quantity

    bare = re.sub(r"^\$|\s*USD$", "", text.strip())
    try:
        dollars = parse_quantity(bare, "tokens")
    except ValueError as error:
        fix = "write it like 2M, 500k or 1234567"
        raise InputError(_violation("--budget", text, "not an amount in USD", fix)) from error
    return _positive("--budget", text, dollars)


def _compute(text: str) -> tuple[float | None, float | None]:
    """Returns (FLOPs, None) or (None, GPU-days)."""
    from flopwright.errors import InputError
    from flopwright.units import parse_quantity

    match = re.fullmatch(r"\s*(\S+?)\s*(GPU-(?:days|hours|years))\s*", text)
    fix = "write it like '1e24 FLOP', '2000 GPU-days' or '5M GPU-hours'"
    bare = re.fullmatch(r"\s*[\d.]+([eE]\+?\d+)?\s*", text) is not None
    try:
        if match is not None:
            days = parse_quantity(match[1], "tokens") * _GPU_TIME[match[2]]
            return None, _positive("--compute-optimal", text, days)
        flops = parse_quantity(f"{text} FLOP" if bare else text, "flops")
    except ValueError as error:
        message = _violation("--compute-optimal", text, "not an amount of compute", fix)
        raise InputError(message) from error
    return _positive("--compute-optimal", text, flops), None


def _positive(field: str, text: str, value: float) -> float:
    from flopwright.errors import InputError

    if value <= 0:
        raise InputError(_violation(field, text, "must be above zero", ""))
    return value
