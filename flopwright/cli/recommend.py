"""`flopwright recommend`: fewest GPUs, longest context, largest model, compute-optimal size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from flopwright.cli import _recommend_options as options
from flopwright.cli._recommend_values import compute_of, seconds_of, usd_of, violation
from flopwright.cli._scenario import scenario_of

if TYPE_CHECKING:
    from flopwright.planner.recommend_answer import Means, Recommendation
    from flopwright.planner.recommend_sizes import Goal
    from flopwright.spec.scenario import Scenario

EXIT_NOTHING_FOUND = 1
_REFIT: Final = "refit"
_QUESTIONS: Final = (
    "--deadline", "--budget", "--longest-context", "--largest-batch", "--largest-model",
    "--compute-optimal",
)  # fmt: skip


def recommend(
    scenario: options.Name = None,
    changes: options.Changes = None,
    deadline: options.Deadline = None,
    budget: options.Budget = None,
    longest_context: options.LongestContext = False,
    largest_batch: options.LargestBatch = False,
    largest_model: options.LargestModel = False,
    compute_optimal: options.ComputeOptimal = None,
    law: options.Law = _REFIT,
    max_gpus: options.MaxGpus = None,
    sure: options.Sure = False,
    every_size: options.EverySize = False,
    calibration: options.CalibrationName = None,
    stack: options.Stack = None,
    out: options.Out = None,
    serve: options.Serve = None,
    node: options.Node = "hgx_h200",
    release: options.Release = None,
    kv_dtype: options.KvDtype = None,
    context: options.Context = "128Ki",
    concurrency: options.Concurrency = 1,
    engine: options.Engine = "vllm",
    experts: options.Experts = 1,
    prompt: options.Prompt = "4000",
    effort: options.Effort = None,
    price: options.Price = None,
    as_json: options.Json = False,
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
        raise InputError(violation("scenario", "", "a scenario is needed", "or --serve MODEL"))
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
        deadline_s=None if deadline is None else seconds_of(deadline),
        budget_usd=None if budget is None else usd_of(budget),
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
        raise InputError(violation("--serve", "", rule, "ask them apart"))


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
        raise InputError(violation("--law", law_name, "no such law", fix))
    law = laws.LOSS_LAWS[law_name]
    flops, gpu_days = compute_of(text)
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
        raise InputError(violation("--out", str(out), "a scenario is written as YAML", fix))
    if out.is_dir():
        raise InputError(violation("--out", str(out), "is a folder", ""))


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
