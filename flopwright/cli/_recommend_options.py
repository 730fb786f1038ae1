"""The options of `flopwright recommend`, each with its one line of help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flopwright.cli._scenario import SET_HELP

_QUESTION = "The question (one; a deadline and a budget go together)"
_SERVING = "Of --serve"

Name = Annotated[str | None, typer.Argument(help="Scenario file, or one that ships by name.")]
Changes = Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)]

Deadline = Annotated[
    str | None,
    typer.Option(help="Fewest GPUs in this time, e.g. 30d.", rich_help_panel=_QUESTION),
]
Budget = Annotated[
    str | None,
    typer.Option(help="Fewest GPUs for this money (USD), e.g. 2M.", rich_help_panel=_QUESTION),
]
LongestContext = Annotated[bool, typer.Option("--longest-context", rich_help_panel=_QUESTION)]
LargestBatch = Annotated[
    bool, typer.Option("--largest-batch", help="Largest micro-batch.", rich_help_panel=_QUESTION)
]
LargestModel = Annotated[
    bool,
    typer.Option("--largest-model", help="Of the model's proportions.", rich_help_panel=_QUESTION),
]
ComputeOptimal = Annotated[
    str | None,
    typer.Option(
        help="Model, data, rate, batch and vocabulary for a budget: '1e24 FLOP' or "
        "'2000 GPU-days'.",
        rich_help_panel=_QUESTION,
    ),
]
Serve = Annotated[
    str | None,
    typer.Option(
        help="Fewest GPUs that serve this model, and at what price; no scenario is needed.",
        rich_help_panel=_QUESTION,
    ),
]

Law = Annotated[
    str, typer.Option(help="Loss law: refit (arXiv 2404.10102) or hoffmann (2203.15556).")
]
MaxGpus = Annotated[
    int | None,
    typer.Option(min=1, help="Largest cluster looked at; default: 8 times the scenario's."),
]
Sure = Annotated[bool, typer.Option("--sure", help="Judge by the high end of the 80 % interval.")]
EverySize = Annotated[
    bool, typer.Option("--every-size", help="Plan every cluster size, none by bisection.")
]
CalibrationName = Annotated[
    str | None, typer.Option("--calibration", help="Path or id, instead of a stack.")
]
Stack = Annotated[
    str | None,
    typer.Option("--stack", help="Software that runs it; default: as the scenario says."),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Write the recommended scenario here (YAML).")
]

Node = Annotated[str, typer.Option(help="Node type that serves.", rich_help_panel=_SERVING)]
Release = Annotated[
    str | None,
    typer.Option(
        help="Weight format: bf16, fp8, block_fp8, int4_g32, mxfp4, nvfp4.",
        rich_help_panel=_SERVING,
    ),
]
KvDtype = Annotated[
    str | None, typer.Option("--kv", help="Cache: bf16 or fp8.", rich_help_panel=_SERVING)
]
Context = Annotated[
    str, typer.Option(help="Tokens a sequence may have.", rich_help_panel=_SERVING)
]
Concurrency = Annotated[
    int, typer.Option(min=1, help="Sequences at once.", rich_help_panel=_SERVING)
]
Engine = Annotated[str, typer.Option(help="Serving engine by name.", rich_help_panel=_SERVING)]
Experts = Annotated[
    int, typer.Option(min=1, help="Models of this size behind a router.", rich_help_panel=_SERVING)
]
Prompt = Annotated[str, typer.Option(help="Prompt tokens of a task.", rich_help_panel=_SERVING)]
Effort = Annotated[
    list[str] | None,
    typer.Option(help="Output tokens of a task, e.g. high=16k.", rich_help_panel=_SERVING),
]
Price = Annotated[
    float | None, typer.Option(min=0, help="USD an hour of a GPU.", rich_help_panel=_SERVING)
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
