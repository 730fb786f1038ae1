"""The command line: one file a verb, each imported only when it is called."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any, Final

import typer
import typer.core

import flopwright
from flopwright.errors import EXIT_BAD_INPUT, InputError

# verb -> one line of help; the verb's function stands in flopwright/cli/<module>.py
VERBS: Final[dict[str, str]] = {
    "plan": "Search the best plans of a scenario: fits or not, how fast, how dear, and why.",
    "explain": "Explain a plan: what binds it, what its neighbours lack, what more would buy.",
    "recommend": "Answer what to buy or train: fewest GPUs, longest context, optimal size.",
    "support": "Say whether a model, GPU and framework are covered, and tested on what.",
    "sweep": "Plan every point of a grid of scenarios; write a table.",
    "simulate": "Simulate one step of a plan: time by class, bubble, memory, a trace.",
    "probe": "Measure this machine; write a cluster file and a first calibration.",
    "export": "Write the files that launch a plan, with its expected numbers.",
    "run": "Run one or more plans for real on this machine.",
    "tournament": "Run the best plans for real and see how good the planner's choice is.",
    "calibrate": "Fit the simulator to the store's measurements.",
    "compare": "Show predicted against measured, before and after calibration.",
    "accuracy": "Predict published runs and show how far off the predictions are.",
    "regret": "Rank configurations that others tuned by hand among all plans.",
    "rollouts": "Simulate RL rollout rounds and find the best lambda.",
    "dashboard": "Open the dashboard in a browser.",
    "demo": "Run the whole loop on this machine.",
    "generate": "Write text with a checkpoint of a run.",
    "convert": "Write a checkpoint folder in another release format (FP8, MXFP4, INT4, bf16).",
    "import": "Read a running job's configuration into a plan file.",
    "import-log": "Read another program's log or trace into the store.",
    "store": "Show what the store holds; write it to a Parquet file, or add one.",
    "import-model": "Read a Hugging Face config.json into a model file.",
    "schema": "Print the JSON Schema of a file kind, for editors.",
    "doctor": "Say what is installed and which verbs work here.",
}

# Verbs whose name is no name in Python.
_MODULES: Final = {"import": "import_run"}


class _LazyGroup(typer.core.TyperGroup):
    """Lists every verb but imports only the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        name = _MODULES.get(cmd_name, cmd_name.replace("-", "_"))
        module = importlib.import_module(f"flopwright.cli.{name}")
        app = typer.Typer(
            add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False
        )
        app.command(name=cmd_name, help=None)(getattr(module, name))
        command = typer.main.get_command(app)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


def _version(value: bool, as_json: bool) -> None:
    if not value:
        return
    if as_json:
        from flopwright.cli.doctor import version_data

        typer.echo(json.dumps(version_data()))
    else:
        typer.echo(f"flopwright {flopwright.__version__}")
    raise typer.Exit


app = typer.Typer(
    cls=_LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    as_json: bool = typer.Option(
        False, "--json", help="With --version: as JSON, with calibration ids."
    ),
) -> None:
    """Capacity planner for training large language models that also runs the training."""
    _version(version, as_json)


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; bad input ends with exit code 2, every violation on stderr.

    With --json every outcome is one JSON object on stdout, usage errors included.
    """
    as_json = "--json" in (sys.argv if argv is None else argv)
    try:
        code = app(args=argv, standalone_mode=not as_json)
    except InputError as error:
        render_error(error, as_json=as_json)
        sys.exit(EXIT_BAD_INPUT)
    except Exception as error:
        # The command-line library's own errors (a missing argument, an unknown option) share
        # no public base class, but all of them can word themselves.
        message = getattr(error, "format_message", None)
        if not as_json or message is None:
            raise
        render_error(InputError(str(message())), as_json=True)
        sys.exit(EXIT_BAD_INPUT)
    if as_json:
        sys.exit(code if isinstance(code, int) else 0)


def render_error(error: InputError, *, as_json: bool) -> None:
    """Writes every violation to stderr (as one JSON object on stdout with --json)."""
    if as_json:
        typer.echo(json.dumps({"error": [v.as_dict() for v in error.violations]}))
        return
    count = len(error.violations)
    typer.echo(f"{count} problem{'s' if count > 1 else ''} with the input:", err=True)
    for violation in error.violations:
        typer.echo(f"  {violation}", err=True)
