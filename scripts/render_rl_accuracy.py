"""Renews the measured tables of docs/rl_accuracy.md.

    flopwright accuracy ROWS.csv --kind rl --json rl.json
    python scripts/render_rl_accuracy.py rl.json [--ablation ablation.json]

The figures between the marks "<!-- rl_accuracy -->" come from the verb's report, those between
"<!-- rl_ablation -->" from benchmarks/rl_ablation.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import textwrap
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "rl_accuracy.md"
Report = dict[str, Any]


def main() -> None:
    """Prints the tables and writes them between their marks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--ablation", type=Path)
    options = parser.parse_args()
    report = json.loads(options.report.read_text(encoding="utf-8"))
    write("rl_accuracy", measured(report, datetime.datetime.now(datetime.UTC).date().isoformat()))
    if options.ablation is not None:
        found = json.loads(options.ablation.read_text(encoding="utf-8"))
        write("rl_ablation", ablation(found))


def write(mark: str, text: str) -> None:
    """Prints a text and puts it between its marks in the page."""
    print(text)
    marked = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(marked.sub(lambda m: m[1] + text + m[2], page), encoding="utf-8")


def measured(data: Report, day: str) -> str:
    """Returns the figures of a report, by class and by preset."""
    absolute, ratio, order = data["absolute"], data["ratio"], data["order"]
    skipped, free = data["skipped"], data["free_parameters"]
    signs, open_ = ratio["signs"], len(absolute["F2"]["undetermined"])
    plain = absolute["F2"]["median_abs_error_of_rows"]
    unscored = sum(1 for s in skipped if s["class"] in {"C", "D", "N"})
    lines = [
        "`flopwright accuracy rl_runs.csv --kind rl`, scenarios of `scenarios/published_rl/`,",
        f"{day}:",
        "",
        "| class | rows | covered | median error | 9 of 10 within |",
        "|---|---|---|---|---|",
        *(_class(k, absolute[k]) for k in ("F1", "F2")),
        _class("R", ratio),
        f"| O | {order['n']} | {_percent(order['coverage'])} | "
        f"{order['right']} of {order['n']} right | |",
        "",
        *textwrap.wrap(
            f"{signs['right']} of {signs['n']} ratios lie on the right side of 1; {open_ or 'no'} "
            f"F2 rows are undetermined; {unscored} rows are not scored. {free['n']} numbers were "
            f"fitted: {len(free['fitted'])} on a row each that is not scored, "
            f"{len(free['of_systems'])} once for a whole system or engine (below). Without "
            f"counting each preset once the median of F2 rows is {_percent(plain)}. By preset, "
            "the median of its absolute rows and of its ratios:",
            98,
        ),
        "",
        "| preset | absolute | ratio |",
        "|---|---|---|",
    ]
    presets = sorted({*absolute["per_preset"], *ratio["per_preset"]})
    for name in presets:
        cells = (_cell(side["per_preset"].get(name)) for side in (absolute, ratio))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *_software(free["of_systems"]), ""])


def _software(fits: list[Report]) -> list[str]:
    """Returns the numbers of software that were fitted on scored rows."""
    if not fits:
        return []
    lines = [
        "",
        "| number of a system or engine | value | rows it was fitted on |",
        "|---|---|---|",
    ]
    for fit in fits:
        of, rows = ", ".join(fit["of"]), ", ".join(fit["rows"])
        lines.append(f"| {of}: `{fit['field']}` | {fit['value']:g} | {rows} |")
    return lines


def _class(name: str, figures: Report) -> str:
    return (
        f"| {name} | {figures['n']} | {_percent(figures['coverage'])} | "
        f"{_percent(figures['median_abs_error'])} | {_percent(figures['p90_abs_error'])} |"
    )


def _cell(figures: Report | None) -> str:
    return "" if figures is None else f"{_percent(figures['median_abs_error'])} ({figures['n']})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def ablation(data: Report) -> str:
    """Returns the medians by preset with every term and without each of them."""
    names = list(data["without"])
    lines = [
        "| preset | all terms | " + " | ".join(f"without {n}" for n in names) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    for preset, figure in data["all"].items():
        cells = [_percent(data["without"][n].get(preset)) for n in names]
        lines.append(f"| {preset} | {_percent(figure)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
