"""Which rollout scenario a page is about: one that ships or an uploaded one; it can be had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import streamlit as st

from flopwright.dashboards.parts import chosen, keep_in_url, opened
from flopwright.dashboards.uploads import uploaded_loop, uploaded_round
from flopwright.spec.base import Spec
from flopwright.spec.load import catalog_names, dump_yaml
from flopwright.spec.loop import LoopScenario, is_loop, load_loop_scenario, round_names
from flopwright.spec.rollout import ROLLOUT_CATALOG, RolloutScenario, load_rollout_scenario

T = TypeVar("T", bound=Spec)


@dataclass(frozen=True, slots=True)
class Chosen(Generic[T]):
    """A scenario to be worked on; `name` is what the command line calls it."""

    name: str
    scenario: T


def chosen_round() -> Chosen[RolloutScenario]:
    """Returns the round of the select box, or the uploaded one.

    Raises:
        InputError: the uploaded file is no round.
    """
    place = st.container()
    own = _upload("round", uploaded_round)
    if own is not None:
        return _shown(Chosen(f"{own.name}.yaml", own))
    return _shipped(place, "rollout", round_names(), load_rollout_scenario)


def chosen_loop() -> Chosen[LoopScenario]:
    """Returns the loop of the select box, or the uploaded one.

    Raises:
        InputError: the uploaded file is no loop.
    """
    place = st.container()
    own = _upload("loop", uploaded_loop)
    if own is not None:
        return _shown(Chosen(f"{own.rollout.name}.yaml", own))
    return _shipped(place, "loop", _loops(), load_loop_scenario)


@cache
def _loops() -> tuple[str, ...]:
    return tuple(n for n in catalog_names(ROLLOUT_CATALOG) if is_loop(n))


def _upload(kind: str, read: Callable[[str, bytes], T]) -> T | None:
    """Returns the scenario that was uploaded in its box, None without one."""
    with opened("Your own scenario", f"own {kind}", stays=True) as wanted:
        if not wanted:
            return None
        file = st.file_uploader(
            f"A {kind} (YAML, at most 1 MB)", type=["yaml", "yml"], key=f"upload {kind}"
        )
    return None if file is None else read(file.name, file.getvalue())


def _shipped(place: Any, key: str, names: Sequence[str], load: Callable[[str], T]) -> Chosen[T]:
    """Returns the scenario of a select box in `place`, which the address keeps as `key`."""
    with place:
        name = chosen("Scenario", names, key)
    keep_in_url(**{key: name})
    return _shown(Chosen(name, load(name)))


def _shown(found: Chosen[T]) -> Chosen[T]:
    """Draws the download of a scenario; returns it."""
    st.download_button(
        "Download this scenario (YAML)",
        lambda: dump_yaml(found.scenario, header="Downloaded from the dashboard."),
        file_name=f"{found.name.removesuffix('.yaml')}.yaml",
        mime="application/yaml",
        on_click="ignore",
    )
    return found
