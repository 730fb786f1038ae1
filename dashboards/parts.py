"""Parts of every page: errors as a designed state, choices kept in the URL, the CLI line.

Every control gets where it starts as its default, never by `st.session_state`: a value set there
is told the browser once, and a turn that is broken off by the next one loses it. Where that comes
from the URL the control has a key: without one its identity would follow the URL, and every second
choice would be lost.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import streamlit as st

from flopwright.errors import InputError
from flopwright.planner.explain import Binding, noticeable


def store_url() -> str | None:
    """Returns the store the dashboard was started with, None for the user's own."""
    return os.environ.get("FLOPWRIGHT_STORE") or None


def show_problems(error: InputError, title: str) -> None:
    """Shows every violation: what is wrong, where, and the nearest fix."""
    st.error(f"**{title}**")
    rows = [
        {
            "where": f"{v.file}:{v.line}" if v.line else v.file,
            "field": v.field,
            "value": _short(v.value),
            "rule": v.rule,
            "limit": v.limit,
            "nearest fix": v.nearest_fix,
        }
        for v in error.violations[:_MOST_PROBLEMS]
    ]
    filled = [key for key in rows[0] if any(row[key] for row in rows)]
    # a table, not a data frame: it wraps long lines
    st.table([{key: _plain(row[key]) for key in filled} for row in rows], hide_index=True)
    if len(error.violations) > _MOST_PROBLEMS:
        st.caption(f"and {len(error.violations) - _MOST_PROBLEMS:,} more")


_MOST_PROBLEMS = 20
_LONGEST_VALUE = 200


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _plain(text: str) -> str:
    """Returns text that a table shows as it stands: it reads Markdown otherwise."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>$#~:|" else c for c in text)


def binding_text(binding: tuple[Binding, ...]) -> str:
    """Returns in a line of Markdown what limits a plan, the strongest three."""
    found = noticeable(binding)[:3]
    return "What binds: " + "; ".join(f"**{b.kind}** ({b.text})" for b in found)


def chosen(label: str, options: Sequence[str], key: str, first: str | None = None) -> str:
    """Returns a choice from a select box that starts at the URL's `key`.

    Args:
        first: what is chosen where the URL says nothing; default: the first option.
    """
    wanted = st.query_params.get(key, first)
    index = options.index(wanted) if wanted in options else 0
    return str(st.selectbox(label, options, index=index, key=f"choice {key}"))


def keep_in_url(**values: str) -> None:
    """Keeps the values in the URL, so that the address reproduces the page; no empty ones."""
    for key, value in values.items():
        if not value:
            st.query_params.pop(key, None)
        elif st.query_params.get(key) != value:
            st.query_params[key] = value


def number(
    label: str, key: str, least: float, most: float, first: float, about: str | None = None
) -> Any:
    """Returns a number from a box that starts at the URL's `key`, and is kept there."""
    start = _number(st.query_params.get(key), least, most, first)
    step = 1 if isinstance(first, int) else 5.0
    value = st.number_input(label, least, most, start, step=step, key=f"number {key}", help=about)
    if value != first or key in st.query_params:
        keep_in_url(**{key: f"{value:g}" if isinstance(first, float) else str(value)})
    return value


def _number(text: str | None, least: float, most: float, first: float) -> float:
    """Returns the URL's number where it is one within the bounds, else the first."""
    try:
        value = type(first)(text or "")
    except ValueError:
        return first
    return value if least <= value <= most else first


def open_tab(names: Sequence[str], key: str) -> tuple[str, Any]:
    """Draws tabs, the open one kept in the URL; returns its name and the place to draw in.

    Only what is drawn there is worked out and sent: a tab that nobody looks at costs nothing.
    """
    tabs = st.tabs(list(names), key=key, bind="query-params")
    pairs = list(zip(names, tabs, strict=True))
    return next(((name, tab) for name, tab in pairs if tab.open), pairs[0])


@contextmanager
def opened(label: str, key: str, *, stays: bool = False) -> Iterator[bool]:
    """Draws an expander; yields whether to draw in it: what is not seen need not be sent.

    Args:
        stays: what was seen once is drawn behind the closed lid as well: a file that is on
            its way would be lost with its box.
    """
    place = st.expander(label, key=key, on_change="rerun")
    if stays and place.open:
        st.session_state[f"seen {key}"] = True
    with place:
        yield bool(place.open) or bool(st.session_state.get(f"seen {key}"))


def chart(figure: Any, *, alt: str, command: Sequence[str], selects: bool = False) -> str | None:
    """Shows a figure and under it the command line that gives the same numbers.

    Args:
        alt: what it shows, for those who do not see it; also its key on the page.
        selects: whether a click on a point counts.

    Returns:
        The `customdata` of the point clicked on, None without one.
    """
    options = {"width": "stretch", "config": {"displaylogo": False}, "key": alt, "alt": alt}
    picked = None
    if selects:
        # What Streamlit would set itself, once the chart stands: it would draw it anew.
        figure.update_layout(clickmode="event+select", hovermode="closest", dragmode="pan")
        state: Any = st.plotly_chart(figure, on_select="rerun", selection_mode="points", **options)
        points = state["selection"]["points"] if state else []
        data = points[0].get("customdata") if points else None
        picked = data[0] if isinstance(data, list) and data else data
    else:
        st.plotly_chart(figure, **options)
    cli_line(command)
    return picked if isinstance(picked, str) else None


def cli_line(command: Sequence[str]) -> None:
    """Shows a command line, ready to be copied.

    As text, not as a code block: colours for one line would cost a page a second.
    """
    st.caption(f"Command line: `` {shlex.join(command)} ``")
