"""How long work looks on a page: its progress, a button that stops it, and what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from flopwright.dashboards.jobs import GRACE_S, Job, jobs, key_of
from flopwright.dashboards.parts import show_problems
from flopwright.spec.base import Spec

T = TypeVar("T")
_EVERY_S = 1.0


def answered(task: str, subject: Spec, more: str = "") -> Any | None:
    """Returns the answer where the work was done before, else None."""
    job = jobs().get(key_of(task, subject, more))
    return None if job is None or job.state != "done" else job.answer


def work(
    task: str,
    subject: Spec,
    read: Callable[[Any], T],
    *,
    start: str = "",
    again: str = "Go on",
    place: str = "",
    more: str = "",
    failed: str = "This cannot be worked out",
    **asked: Any,
) -> T | None:
    """Returns the answer of a task on a record; while there is none, draws what is to be seen.

    Args:
        read: makes the answer out of the worker's data.
        start: the text of the button that starts it; "" starts it at once.
        place: which part of the page asks: it wants one answer at a time.
        more: what else the answer depends on, beside the record.
        asked: the request, beside the record.
    """
    key = key_of(task, subject, more)
    job = jobs().get(key)
    if job is not None and job.state == "done":
        answer: T = job.answer
        return answer
    stopped = st.session_state.get(f"stopped {key}", False)
    wanted = st.session_state.get(f"wanted {key}", not start)
    going = job is not None and job.is_going
    if job is not None and job.error is not None:
        show_problems(job.error, failed)
    if stopped or not (wanted or going) or (job is not None and job.error is not None):
        label = again if stopped or job is not None else start
        if not st.button(label, key=f"start {key}"):
            return None
        st.session_state[f"stopped {key}"] = False
        st.session_state[f"wanted {key}"] = True
    watcher = _moved_on(f"{place} {task}", key)
    request = {"scenario": subject.to_data(), **asked}
    delay_s = 0.0 if start else GRACE_S
    job = jobs().ask(key, task, request, read, watcher, delay_s)
    _watched(key, watcher)
    return None


def _moved_on(place: str, key: str) -> str:
    """Returns this session's name as a watcher; what the place asked for before is let go."""
    context = get_script_run_ctx()
    watcher = f"{'' if context is None else context.session_id} {place}"
    state = f"watches {place}"
    before = st.session_state.get(state)
    if before not in {None, key}:
        old = jobs().get(before)
        if old is not None:
            old.leave(watcher)
    st.session_state[state] = key
    return watcher


def _progress(key: str, watcher: str) -> None:
    """Draws how far the work is; draws the page anew when it ended."""
    job = jobs().get(key)
    if job is None or not job.is_going:
        st.rerun()
        return
    job.look(watcher)
    left, right = st.columns([8, 1], vertical_alignment="bottom")
    left.progress(_share(job), job.text)
    if right.button("Stop", key=f"stop {key}", help="end this work; what stands here stays"):
        st.session_state[f"stopped {key}"] = True
        job.leave(watcher)
        st.rerun()


_watched: Callable[[str, str], None] = st.fragment(run_every=_EVERY_S)(_progress)


def _share(job: Job) -> float:
    return min(1.0, job.done / job.total) if job.total else 0.0
