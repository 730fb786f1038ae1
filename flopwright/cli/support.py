"""`flopwright support`: is my model, GPU and framework covered, and tested on what."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from flopwright.plan.file import PlanFile
    from flopwright.planner.support_answer import Count, Support

_SHOWN = 12


def support(
    model: Annotated[str | None, typer.Option(help="Model of the catalog, or a file.")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU, e.g. h100_sxm or 'H100'.")] = None,
    framework: Annotated[
        str | None, typer.Option(help="Framework, e.g. megatron, nemo or torchtitan.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="List every published run and curve.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Say what covers a model, a GPU and a framework: curves, stacks, exports, published runs.

    Without options it lists what there is.

    Example: flopwright support --model llama31_70b --gpu h100 --framework nemo
    """
    from flopwright.cli._console import console_of
    from flopwright.planner.support import support as covered_by

    found = covered_by(_judge, model, gpu, framework)
    if as_json:
        typer.echo(json.dumps(found.to_data()))
        return
    console = console_of(120)
    colour = {"tested": "green", "covered": "yellow", "assumed": "red"}[found.verdict]
    console.print(f"[bold {colour}]{found.answer}[/]", highlight=False, soft_wrap=True)
    if found.by_part:
        _print_parts(console, found, every=every)
    else:
        for title, counts in (
            ("Models of published runs", found.models),
            ("GPUs", found.gpus),
            ("Frameworks", found.frameworks),
        ):
            _print_counts(console, title, counts, every=every)
    _print_rest(console, found)


def _judge(plan: PlanFile) -> tuple[list[str], frozenset[str]]:
    """Returns what the executor refuses of a plan, and the fields it has rules for."""
    from flopwright.executor.launch.supported import refused_fields, unsupported

    return [f"{v.field} {v.value}" for v in unsupported(plan)], refused_fields(plan)


def _print_parts(console: Console, found: Support, *, every: bool) -> None:
    from flopwright.units import plural, show_percent

    for part in found.by_part:
        console.print(f"  {part.name}: {plural(part.runs, 'published run')}", highlight=False)
    if found.gpu is not None:
        gpu = found.gpu
        console.print(
            f"[bold]Priced by:[/] {gpu.calibration}, its 80 % interval a factor of "
            f"{gpu.factor80:.2f} either way ({gpu.source})",
            highlight=False,
            soft_wrap=True,
        )
        if gpu.missing:
            console.print(f"  no curve: {', '.join(gpu.missing)}", highlight=False)
        for c in gpu.curves if every else gpu.curves[:_SHOWN]:
            held = c.held_out_median
            error = "" if held is None else f", held-out error {show_percent(held)} (median)"
            text = f"  {c.kind} {c.dtype} {c.phase}: {plural(c.points, 'point')}{error}"
            console.print(text, highlight=False)
        _print_more(console, len(gpu.curves), every=every)
    for run in found.tested if every else found.tested[:_SHOWN]:
        console.print(
            f"  {run.model} on {run.gpus} x {run.gpu}, {run.framework}: {run.url}",
            highlight=False,
            soft_wrap=True,
        )
    _print_more(console, len(found.tested), every=every)


def _print_more(console: Console, count: int, *, every: bool) -> None:
    if count > _SHOWN and not every:
        console.print(f"  and {count - _SHOWN} more (--all)", highlight=False)


def _print_counts(console: Console, title: str, counts: tuple[Count, ...], *, every: bool) -> None:
    shown = counts if every else counts[:_SHOWN]
    text = ", ".join(f"{c.name} {c.runs}" for c in shown)
    more = "" if len(shown) == len(counts) else f", and {len(counts) - len(shown)} more (--all)"
    console.print(f"[bold]{title}:[/] {text}{more}", highlight=False, soft_wrap=True)


def _print_rest(console: Console, found: Support) -> None:
    if found.framework is not None:
        stacks = ", ".join(f"{s.name} ({s.spread80:.2f})" for s in found.stacks)
        console.print(
            f"[bold]Fitted stacks (80 % factor either way):[/] {stacks or 'none'}",
            highlight=False,
            soft_wrap=True,
        )
    works = ", ".join(t.name for t in found.targets if t.works)
    always = "torchrun, Slurm and DeepSpeed JSON of every bundle"
    console.print(
        f"[bold]Exports of its simplest plan:[/] {always}; {works or 'no other'}",
        highlight=False,
        soft_wrap=True,
    )
    for target in found.targets:
        if not target.works:
            console.print(
                f"  not {target.name}: {target.refused}", highlight=False, soft_wrap=True
            )
    runs = found.executor
    if runs is not None:
        refused = "" if runs.works else f": not {', '.join(runs.refused)}"
        console.print(
            f"[bold]flopwright run takes that plan:[/] {'yes' if runs.works else 'no'}{refused}",
            highlight=False,
        )
        fields = ", ".join(runs.fields)
        console.print(f"  it refuses some values of: {fields}", highlight=False, soft_wrap=True)
