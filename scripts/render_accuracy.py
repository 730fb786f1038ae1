"""Renews the accuracy tables in README.md and docs/accuracy.md: `make accuracy`.

The table between the marks "<!-- accuracy -->" and "<!-- /accuracy -->" is computed on the
published runs that ship (scenarios/published), by the committed stacks. With --committed,
--cell and --stack, reports that `flopwright accuracy FILE --json` wrote of all measured runs
(without and with --cross-validate), the table of targets in docs/accuracy.md is renewed too.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from flopwright.simulator.accuracy.report_make import accuracy_report

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/accuracy.md")
Report = dict[str, Any]


def main() -> None:
    """Computes the tables, prints them and writes them into the pages that have the marks."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("committed", "cell", "stack"):
        parser.add_argument(f"--{name}", type=Path)
    options = parser.parse_args()
    write("accuracy", shipped_table(accuracy_report(None, ("gpu",)).to_data()))
    paths = (options.committed, options.cell, options.stack)
    if all(paths):
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        write("targets", targets_table(*reports))


def write(mark: str, table: str) -> None:
    """Prints a table and puts it between its marks in every page that has them."""
    print(table)
    marked = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    for name in PAGES:
        page = REPOSITORY / name
        text = page.read_text(encoding="utf-8")
        page.write_text(marked.sub(lambda m: m[1] + table + m[2], text), encoding="utf-8")


def shipped_table(data: Report) -> str:
    """Returns the report on the runs that ship as a table in Markdown."""
    lines = [
        "| published runs | n | median error | 9 of 10 within | bias | in the 80 % interval |",
        "|---|---|---|---|---|---|",
        _row("**all**", data["overall"]),
    ]
    lines += [_row(name, data["groups"][name]) for name in ("dense", "moe")]
    lines += [_row(f"baseline: {b['about']}", b) for b in data["baselines"].values()]
    gpus = sorted({r["gpu"] for r in data["runs"] if not r["apart"]})
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


def _row(name: str, score: Report) -> str:
    if not score["n"]:
        return f"| {name} | 0 | | | | |"
    return (
        f"| {name} | {score['n']} | {score['median_abs_error']:.1%} | "
        f"{score['p90_abs_error']:.1%} | {score['bias']:+.1%} | "
        f"{score['interval80_coverage']:.0%} |"
    )


def targets_table(committed: Report, cell: Report, stack: Report) -> str:
    """Returns what was asked for beside what was measured, on all measured runs."""
    groups, baselines = cell["groups"], cell["baselines"]
    left, unseen = cell["overall"], stack["overall"]
    rows = [
        ("dense, cell left out: median, p90", "8, 20 %", _pair(groups["dense"])),
        ("experts, cell left out: median, p90", "18, 40 %", _pair(groups["moe"])),
        ("over cells, cell left out: median, p90", "8, 22 %", _pair(left["macro"])),
        ("all, cell left out: median, p90", "", _pair(left)),
        *(
            (f"baseline {name.replace('_', ' ')}, cell left out", "", _pair(b))
            for name, b in baselines.items()
            if b["n"]
        ),
        ("all, stack left out: median, p90", "15, 30 %", _pair(unseen)),
        ("80 % interval, stack left out: covers", "75 to 90 %",
         f"{unseen['interval80_coverage']:.0%}"),
        ("80 % interval, cell left out: covers", "", f"{left['interval80_coverage']:.0%}"),
        ("coverage in scope", "90 %", f"{left['coverage']:.1%}"),
        ("vTrain multi-node, mean error, cell left out", "10 %",
         f"{_mean(cell, 'via-research/vtrain'):.1%}"),
        ("vTrain single-node (composed rows), committed stacks: mean error", "7 %",
         f"{_mean(committed, 'via-research/vtrain', 'vtrain-single'):.1%}"),
        ("rank within a sweep, median, committed stacks", "0.95",
         f"{committed['overall']['spearman']:.2f}"),
        ("all, committed stacks: median, p90", "", _pair(committed["overall"])),
        *(
            (f"baseline {name.replace('_', ' ')}, committed stacks", "", _pair(b))
            for name, b in committed["baselines"].items()
            if b["n"]
        ),
        ("fitted numbers", "", str(cell["free_parameters"])),
    ]  # fmt: skip
    for name, asked in (("allocated", "3"), ("reserved", "4"), ("smi", "10")):
        score = cell["memory"]["groups"].get(name)
        if score:
            found = f"{_pair(score)}; under by 5 %: {score['under_by_5_percent_share']:.0%}"
            rows.append((f"memory {name}, model left out: median, p90", f"{asked}, 15 %", found))
    lines = ["| figure | asked | measured |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {a} | {b} | {c} |" for a, b, c in rows), ""])


def _pair(score: Report) -> str:
    return f"{score['median_abs_error']:.1%}, {score['p90_abs_error']:.1%}"


def _mean(data: Report, source: str, apart: str = "") -> float:
    errors = [
        abs(r["error"]) for r in data["runs"] if r["source"] == source and r["apart"] == apart
    ]
    return sum(errors) / len(errors)


if __name__ == "__main__":
    main()
