"""Renders docs/published_numbers.md; run as a script it writes the file."""

from __future__ import annotations

from pathlib import Path

from golden_recompute import Number, load_numbers, recompute

DOCUMENT = Path(__file__).parents[2] / "docs" / "published_numbers.md"
_HEAD = """# Published numbers, recomputed

Figures that others published about the models this tool plans, and the same figures from
the tool's own functions. The values, sources and tolerances stand in
`tests/golden/published_numbers.yaml`; a test recomputes each and fails when this page is
stale (`python tests/golden/golden_render.py` renews it).

| what | published | computed | difference | source | computed by |
|---|---:|---:|---:|---|---|
"""


def render() -> str:
    """Returns the page as Markdown text."""
    numbers, models = load_numbers()
    rows = [_row(n, recompute(n, models)) for n in numbers]
    notes = [f"- {n.what}: {n.note}." for n in numbers if n.note]
    return _HEAD + "\n".join(rows) + "\n\n## Notes\n\n" + "\n".join(notes) + "\n"


def _row(number: Number, computed: float) -> str:
    difference = computed / number.value - 1
    cells = (
        number.what,
        _show(number.value, number.unit),
        _show(computed, number.unit),
        "exact" if difference == 0 else f"{100 * difference:+.3f} %",
        number.source,
        f"`{number.how}`",
    )
    return "| " + " | ".join(cells) + " |"


def _show(value: float, unit: str) -> str:
    if float(value).is_integer() and "FLOP" not in unit:
        text = f"{int(value):,}"
    else:
        text = f"{value:.6g}"
    return f"{text} {unit}".strip()


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
