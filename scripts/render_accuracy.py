"""Renews the accuracy tables in README.md and docs/accuracy.md: `make accuracy`.

The tables stand between the marks "<!-- accuracy -->" and "<!-- /accuracy -->" and are
computed on the published runs that ship (scenarios/published), by the committed stacks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from flopwright.simulator.accuracy.report import AccuracyReport
from flopwright.simulator.accuracy.report_make import accuracy_report

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/accuracy.md")
_MARKED = re.compile(r"(<!-- accuracy -->\n).*?(<!-- /accuracy -->)", re.DOTALL)


def main() -> None:
    """Computes the table, prints it and writes it into the pages that have the marks."""
    table = accuracy_table(accuracy_report(None, ("gpu",)))
    print(table)
    for name in PAGES:
        page = REPOSITORY / name
        text = page.read_text(encoding="utf-8")
        page.write_text(_MARKED.sub(lambda m: m[1] + table + m[2], text), encoding="utf-8")


def accuracy_table(report: AccuracyReport) -> str:
    """Returns the report as a table in Markdown."""
    data = report.to_data()
    lines = [
        "| published runs | n | median error | 9 of 10 within | bias | in the 80 % interval |",
        "|---|---|---|---|---|---|",
        _row("**all**", data["overall"]),
    ]
    lines += [_row(name, data["groups"][name]) for name in ("dense", "moe")]
    lines += [_row(f"baseline: {b['about']}", b) for b in data["baselines"].values()]
    gpus = sorted({run.labels["gpu"] for run in report.headline()})
    lines += [_row(gpu, data["groups"][gpu]) for gpu in gpus]
    cells = data["overall"]["macro"]
    lines += [
        "",
        f"Over {cells['cells']} cells (source, model, GPU): median "
        f"{cells['median_abs_error']:.1%}, 9 of 10 within {cells['p90_abs_error']:.1%}. "
        f"{data['free_parameters']} fitted numbers.",
        "",
    ]
    return "\n".join(lines)


def _row(name: str, score: dict[str, Any]) -> str:
    if not score["n"]:
        return f"| {name} | 0 | | | | |"
    return (
        f"| {name} | {score['n']} | {score['median_abs_error']:.1%} | "
        f"{score['p90_abs_error']:.1%} | {score['bias']:+.1%} | "
        f"{score['interval80_coverage']:.0%} |"
    )


if __name__ == "__main__":
    main()
