"""What `recommend --serve` prints, and how its options are read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from flopwright.errors import InputError, Violation
from flopwright.units import parse_quantity, plural, show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from flopwright.planner.serving.serve import Serving

EXIT_NOTHING_FOUND = 1


def tokens_of(option: str, text: str) -> int:
    """Returns a count of tokens such as "128Ki" or 4000.

    Raises:
        InputError: not a count above zero.
    """
    try:
        found = round(parse_quantity(text, "tokens"))
    except ValueError as error:
        raise InputError(Violation(field=option, value=text, rule=str(error))) from error
    if found < 1:
        raise InputError(Violation(field=option, value=text, rule="must be at least 1"))
    return found


def efforts_of(texts: list[str]) -> dict[str, int]:
    """Returns output tokens by effort level from options such as "high=16k".

    Raises:
        InputError: no name, or no count.
    """
    out = {}
    for text in texts:
        name, equals, tokens = text.partition("=")
        if not name or not equals:
            rule = "must be a level and its output tokens"
            raise InputError(
                Violation(field="--effort", value=text, rule=rule, nearest_fix="high=16k")
            )
        out[name] = tokens_of("--effort", tokens)
    return out


def show(found: Serving, *, as_json: bool) -> None:
    """Prints the answer; exit code 1 where nothing that was looked at holds the model."""
    if as_json:
        typer.echo(json.dumps(found.to_data()))
    else:
        typer.echo("\n".join(lines(found)))
    if not found.gpus:
        raise typer.Exit(EXIT_NOTHING_FOUND)


def lines(found: Serving) -> list[str]:
    """Returns the answer as lines of text."""
    many = plural(found.models, "model") if found.models > 1 else found.model
    out = [
        f"{many}: {found.weight_bytes / 1e12:.3f} TB of weights; alone they need "
        f"{plural(found.gpus_for_weights, 'GPU')} ({found.gpu})"
    ]
    if not found.gpus:
        return [*out, "No number of GPUs that was looked at holds it with its caches."]
    out += [
        f"With caches: {plural(found.gpus, 'GPU')}, {found.layout}; "
        f"{show_bytes(found.cache_bytes_per_gpu)} of cache a GPU hold "
        f"{plural(found.sequences, 'sequence')}",
        f"Decode: {show_count(found.tokens_per_s_per_gpu)} tokens/s a GPU, "
        f"{show_count(found.tokens_per_s_per_user)} a user; "
        f"prefill: {show_count(found.prefill_tokens_per_s_per_gpu)} tokens/s a GPU",
    ]
    if found.usd_per_million_tokens is not None:
        out.append(f"USD a million output tokens: {found.usd_per_million_tokens:.3g}")
    for level, seconds in found.seconds_per_task.items():
        money = found.usd_per_task.get(level)
        price = f", USD {money:.3g}" if money is not None else ""
        out.append(f"A task at {level} effort: {show_seconds(seconds)}{price}")
    return [*out, *(f"  {note}" for note in found.assumptions)]
