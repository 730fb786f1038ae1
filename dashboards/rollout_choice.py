"""Which rollout scenario a page is about: one that ships or an uploaded one; it can be had."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import streamlit as st

from flopwright.dashboards.parts import chosen, keep_in_url
from flopwright.dashboards.uploads import uploaded_loop, uploaded_round
from flopwright.spec.load import catalog_names, dump_yaml
from flopwright.spec.loop import LoopScenario, is_loop, load_loop_scenario, round_names
from flopwright.spec.rollout import ROLLOUT_CATALOG, RolloutScenario, load_rollout_scenario


class Round(NamedTuple):
    """A round to be simulated; `name` is what the command line calls it."""

    name: str
    scenario: RolloutScenario


class Loop(NamedTuple):
    """A loop to be planned; `name` is what the command line calls it."""

    name: str
    scenario: LoopScenario


def chosen_round() -> Round:
    """Returns the round of the select box, or the uploaded one.

    Raises:
        InputError: the uploaded file is no round.
    """
    with _row():
        upload = _upload("round")
        if upload is not None:
            own = uploaded_round(*upload)
            found = Round(f"{own.name}.yaml", own)
        else:
            name = chosen("Scenario", round_names(), "rollout")
            keep_in_url(rollout=name)
            found = Round(name, load_rollout_scenario(name))
        _download(found)
    return found


def chosen_loop() -> Loop:
    """Returns the loop of the select box, or the uploaded one.

    Raises:
        InputError: the uploaded file is no loop.
    """
    with _row():
        upload = _upload("loop")
        if upload is not None:
            own = uploaded_loop(*upload)
            found = Loop(f"{own.rollout.name}.yaml", own)
        else:
            name = chosen("Scenario", _loops(), "loop")
            keep_in_url(loop=name)
            found = Loop(name, load_loop_scenario(name))
        _download(found)
    return found


def _row() -> Any:
    return st.container(horizontal=True, vertical_alignment="bottom")


@cache
def _loops() -> tuple[str, ...]:
    return tuple(n for n in catalog_names(ROLLOUT_CATALOG) if is_loop(n))


def _upload(kind: str) -> tuple[str, bytes] | None:
    with st.popover("Your own scenario", help="upload a scenario of your own, or download this"):
        file = st.file_uploader(
            f"A {kind} (YAML, at most 1 MB)", type=["yaml", "yml"], key=f"upload {kind}"
        )
    return None if file is None else (file.name, file.getvalue())


def _download(found: Round | Loop) -> None:
    st.download_button(
        "Download this scenario (YAML)",
        lambda: dump_yaml(found.scenario, header="Downloaded from the dashboard."),
        file_name=f"{found.name.removesuffix('.yaml')}.yaml",
        mime="application/yaml",
        on_click="ignore",
    )
