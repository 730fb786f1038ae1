"""The options of `flopwright rollouts`, each with its one line of help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from flopwright.errors import InputError, Violation

LOOP_TIME_LIMIT_S: Final = 180.0
LOOPS_LISTED: Final = 5
_SEARCH = "Planning a loop"
_FILES = "Files"

Name = Annotated[
    str, typer.Argument(help="Rollout or loop: a YAML file or the name of one that ships.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Change a field, e.g. prompts=64, or of a loop search.tp=[8,16]; repeat it."
    ),
]
Fraction = Annotated[
    float | None,
    typer.Option("--lambda", help="Share of the attempts in flight that ends a round."),
]
Sweep = Annotated[bool, typer.Option("--sweep", help="Also find the best lambda.")]
MaxStaleness = Annotated[
    float | None,
    typer.Option("--max-staleness", help="Bound on the mean policy versions behind.", min=0),
]
Rounds = Annotated[
    int | None,
    typer.Option("--rounds", help="Rounds kept, after the warm-up.", min=1, max=10_000),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the lengths.", min=0)]
Search = Annotated[
    bool,
    typer.Option(
        "--search",
        help="Plan the loop; done anyway for a scenario of kind rl_loop.",
        rich_help_panel=_SEARCH,
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        help=f"Seconds after which nothing more is tried ({LOOP_TIME_LIMIT_S:g}).",
        min=0,
        rich_help_panel=_SEARCH,
    ),
]
Top = Annotated[
    int | None,
    typer.Option(
        "--top",
        help=f"Loops to list ({LOOPS_LISTED}).",
        min=1,
        max=100,
        rich_help_panel=_SEARCH,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Write the best plan here (.yaml).", rich_help_panel=_SEARCH),
]
Campaign = Annotated[
    bool,
    typer.Option("--campaign", help="Lengths that grow: fixed concurrency against the throttle."),
]
Growth = Annotated[
    float | None,
    typer.Option(
        "--growth", help="With --campaign: lengths of the last round over the first (8)."
    ),
]
Png = Annotated[
    Path | None, typer.Option("--png", help="Write a picture here.", rich_help_panel=_FILES)
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Write one round as a Chrome trace (.json or .json.gz).",
        rich_help_panel=_FILES,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class Targets:
    """The files that are asked for."""

    png: Path | None
    out: Path | None
    trace: Path | None

    def check(self) -> None:
        """Refuses files of another kind and folders that are not there, all at once."""
        from flopwright.cli._targets import check_file

        check_file("--png", self.png, ".png", "the picture is a PNG")
        check_file("--out", self.out, ".yaml", "the plan is YAML")
        if self.trace is not None and not self.trace.name.endswith((".json", ".json.gz")):
            fix = f"write {self.trace.with_suffix('.json')}" if self.trace.name else ""
            rule = "a Chrome trace is JSON"
            raise InputError(
                Violation(field="--trace", value=str(self.trace), rule=rule, nearest_fix=fix)
            )
        found = [
            Violation(field=flag, value=str(path), rule=f"no such folder: {path.parent}")
            for flag, path in (("--png", self.png), ("--out", self.out), ("--trace", self.trace))
            if path is not None and not path.parent.is_dir()
        ]
        if found:
            raise InputError(found)


def check_together(given: dict[str, tuple[object, bool, str]]) -> None:
    """Refuses options of something that was not asked for: they would change nothing.

    Args:
        given: by option: its value (None or False: not given), whether it belongs to what is
            done, and what to add so that it does.
    """
    found = [
        Violation(
            field=flag,
            value="" if value is True else f"{value}",
            rule="changes nothing here",
            nearest_fix=fix,
        )
        for flag, (value, belongs, fix) in given.items()
        if value is not None and value is not False and not belongs
    ]
    if found:
        raise InputError(found)
