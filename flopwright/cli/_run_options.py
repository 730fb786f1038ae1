"""Options that verbs share which run plans for real: `run` and `tournament`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Text = Annotated[
    Path | None,
    typer.Option("--text", help="Folder, file, JSONL or Parquet; default: Python's library."),
]
Tokenizer = Annotated[
    Literal["bpe", "characters"], typer.Option("--tokenizer", help="How text becomes tokens.")
]
Stream = Annotated[
    bool, typer.Option("--stream", help="Read the text while the run goes on, not before it.")
]
Prefetch = Annotated[
    int | None,
    typer.Option("--prefetch", min=0, help="Batches made ahead; default: 2 with --stream."),
]
Nproc = Annotated[
    int | None,
    typer.Option("--nproc", min=1, help="Ranks; more than cores share them (CPU only)."),
]
ProbeSeconds = Annotated[
    float, typer.Option("--probe-seconds", min=1, help="Time to measure the machine.")
]
StoreUrl = Annotated[
    str | None, typer.Option("--store", help="Store URL; default: the local SQLite file.")
]
NoStore = Annotated[bool, typer.Option("--no-store", help="Keep the measurements in --out only.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
