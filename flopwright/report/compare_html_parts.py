"""Parts of the comparison's page: the split error, who took how long, plans that became slower."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any, Final

from flopwright.report.compare_report import ComparedRun, ComparisonReport
from flopwright.report.compare_style import AFTER, HELD_OUT
from flopwright.report.findings import link_label
from flopwright.units import show_seconds

MAX_ROWS: Final = 24


def split_figure(go: Any, runs: Sequence[ComparedRun]) -> Any:
    """Returns bars of cost and structure error by run, which add up to the signed error."""
    found = [(r.plan_name, r.after.split) for r in runs if r.after.split is not None]
    names = [name for name, _ in found]
    figure = go.Figure()
    for title, colour, values in (
        ("cost: what actions take", AFTER, [100 * s.cost for _, s in found]),
        ("structure: waiting and overlap", HELD_OUT, [100 * s.structure for _, s in found]),
    ):
        figure.add_bar(x=names, y=values, name=title, marker_color=colour)
    figure.update_layout(
        title="step-time error, in its two parts",
        barmode="relative",
        yaxis_title="error (% of the step)",
        height=380,
    )
    return figure


def alarms(report: ComparisonReport) -> str:
    """Returns a paragraph a plan that became slower; "" of none."""
    found = [d.text() for d in report.drifts if d.alarm]
    return "".join(f"<p class='alarm'>Slower: {html.escape(text)}</p>" for text in found)


def routing(report: ComparisonReport) -> str:
    """Returns a paragraph for each run whose experts got uneven rows."""
    texts = filter(None, (r.routing_text() for r in report.runs))
    return "".join(f"<p>{html.escape(text)}</p>" for text in texts)


def details(report: ComparisonReport) -> str:
    """Returns what to open: each run's findings, ranks, links and kernel classes."""
    return "".join(_run_details(run) for run in report.runs)


def _run_details(run: ComparedRun) -> str:
    after = run.after
    texts = "".join(f"<li>{html.escape(f.text)}</li>" for f in after.findings)
    parts: list[tuple[str, list[tuple[str, float, float]]]] = [
        (
            "rank, compute",
            [
                (f"{r.rank} (stage {r.stage})", r.compute_predicted_s, r.compute_measured_s)
                for r in after.ranks
            ],
        ),
        ("link", [(link_label(x.cls, x.ranks), x.predicted_s, x.measured_s) for x in after.links]),
        ("kernel class", [(k.name, k.predicted_s, k.measured_s) for k in after.kernels]),
    ]
    tables = "".join(_table(name, rows) for name, rows in parts if rows)
    if not texts and not tables:
        return ""
    found = f"<ol>{texts}</ol>" if texts else "<p>Nothing stands out of the noise.</p>"
    name = html.escape(run.plan_name)
    return f"<details><summary>{name}: what stands out, and who took how long</summary>{found}{tables}</details>"  # noqa: E501


def _table(what: str, rows: Sequence[tuple[str, float, float]]) -> str:
    worst = sorted(rows, key=lambda r: -abs(r[1] - r[2]))[:MAX_ROWS]
    head = _cells((what, "predicted", "measured", "error"), "th")
    body = "".join(
        _cells(
            (
                name,
                show_seconds(predicted),
                show_seconds(measured),
                f"{predicted / measured - 1:+.1%}" if measured > 0 else "-",
            ),
            "td",
        )
        for name, predicted, measured in worst
    )
    more = f"<p>{len(rows) - MAX_ROWS} more stand in --json.</p>" if len(rows) > MAX_ROWS else ""
    return f"<table>{head}{body}</table>{more}"


def _cells(cells: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(c)}</{tag}>' for c in cells)}</tr>"
