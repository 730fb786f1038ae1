"""Parts of every page: errors as a designed state, choices kept in the URL, the CLI line."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
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
            "value": v.value,
            "rule": v.rule,
            "limit": v.limit,
            "nearest fix": v.nearest_fix,
        }
        for v in error.violations
    ]
    filled = [key for key in rows[0] if any(row[key] for row in rows)]
    # a table, not a data frame: it wraps long lines
    st.table([{key: row[key] for key in filled} for row in rows], hide_index=True)


def binding_text(binding: tuple[Binding, ...]) -> str:
    """Returns in a line of Markdown what limits a plan, the strongest three."""
    found = noticeable(binding)[:3]
    return "What binds: " + "; ".join(f"**{b.kind}** ({b.text})" for b in found)


def chosen(label: str, options: Sequence[str], key: str) -> str:
    """Returns a choice from a select box that starts at the URL's `key`.

    The box has a key of its own: without one its identity would follow the URL, and every
    second choice would be lost.
    """
    state = f"choice {key}"
    if st.session_state.get(state) not in options:
        wanted = st.query_params.get(key)
        st.session_state[state] = wanted if wanted in options else options[0]
    return str(st.selectbox(label, options, key=state))


def keep_in_url(**values: str) -> None:
    """Keeps the values in the URL, so that the address reproduces the page."""
    for key, value in values.items():
        if st.query_params.get(key) != value:
            st.query_params[key] = value


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
        state: Any = st.plotly_chart(figure, on_select="rerun", selection_mode="points", **options)
        points = state["selection"]["points"] if state else []
        data = points[0].get("customdata") if points else None
        picked = data[0] if isinstance(data, list) and data else data
    else:
        st.plotly_chart(figure, **options)
    cli_line(command)
    return picked if isinstance(picked, str) else None


def cli_line(command: Sequence[str]) -> None:
    """Shows a command line, ready to be copied."""
    st.code(shlex.join(command), language="bash", wrap_lines=True)
