"""`flopwright demo`: the whole loop on this machine, in one verb."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[
        Path, typer.Option("--out", help="Folder for everything the demo writes.")
    ] = Path("runs/demo"),
    steps: Annotated[
        int, typer.Option("--steps", min=30, help="Optimizer steps of each mini run.")
    ] = 80,
    text: Annotated[
        Path | None, typer.Option("--text", help="Folder, JSONL or Parquet to train on.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of weights and data order.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only the last line, the JSON object.")
    ] = False,
) -> None:
    """Run the whole loop: plan K2 on paper, train a mini K2 under three plans, calibrate, compare.

    The mini runs go over two local ranks, interleaved in one launch. Two plans calibrate the
    simulator, the third is predicted and compared. The last line is one JSON object.

    Example: flopwright demo --steps 80 --out runs/demo
    """
    from flopwright.cli._demo_steps import run_demo

    run_demo(out=out, steps=steps, text=text, seed=seed, quiet=as_json)
