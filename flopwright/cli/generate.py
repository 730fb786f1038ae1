"""`flopwright generate`: text out of a checkpoint."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer

from flopwright.errors import InputError, Violation

_NEEDED_PACKAGES = ("torch", "tokenizers", "safetensors")


def generate(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder of a run, one of its checkpoints, or a step in it.")
    ],
    prompt: Annotated[str, typer.Option("--prompt", help="Text to go on from.")] = "",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Most tokens to write.")
    ] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="0 takes the likeliest token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampling.")] = 0,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Which saved step; default the latest.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write text with a checkpoint of a run.

    Prints the prompt and what the model adds to it; with --json one object with both.

    Example: flopwright generate runs/first --prompt "A plan" --max-tokens 61
    """
    missing = [name for name in _NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            Violation(
                rule=f"generating needs {', '.join(missing)}",
                nearest_fix="pip install 'flopwright[train]'",
            )
        )
    from flopwright.executor import generate as engine

    engine.check_sampling(temperature, seed)
    model = engine.load_text_model(checkpoint, step)
    if not as_json:
        typer.echo(prompt, nl=False)
    result = engine.generate(
        model,
        prompt,
        max_tokens,
        temperature,
        seed,
        None if as_json else lambda piece: typer.echo(piece, nl=False),
    )
    if not as_json:
        typer.echo()
        return
    data = {
        "model": model.spec.name,
        "step": model.step,
        "prompt": prompt,
        "text": result.text,
        "token_ids": list(result.token_ids),
        "prompt_tokens": result.prompt_tokens,
        "stopped": result.stopped,
        "temperature": temperature,
        "seed": seed,
    }
    typer.echo(json.dumps(data))
