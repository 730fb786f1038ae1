"""What is on the screen: a scenario with its changes. It lives in the address.

`?scenario=NAME&set=FIELD=VALUE&set=...` reopens the same view, and is what the command line
takes: `flopwright plan NAME --set FIELD=VALUE`. A second scenario beside it has the same keys
with `b_` before them. An uploaded scenario is kept for the session only: it is data of the
user's, so it can be downloaded with its changes, and the command line then names that file.
So it does for a machine that was probed here (`set=cluster=probed NAME`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import streamlit as st
import yaml

from flopwright.dashboards.uploads import uploaded_scenario
from flopwright.simulator.calibration.machines import load_machine
from flopwright.spec.changed import changed, parse_changes
from flopwright.spec.load import SCENARIO_CATALOG, catalog_names, dump_yaml, load_scenario
from flopwright.spec.scenario import Scenario

UPLOADED: Final = "(uploaded)"
# Before the name of a machine that was probed here, where a cluster is named.
PROBED: Final = "probed "
Upload = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class View:
    """A scenario's reference and its changes as `FIELD=VALUE` words.

    Attributes:
        name: of a scenario that ships, or UPLOADED.
        slot: "" of the first scenario, "b_" of the one beside it.
        added: values that no word can say (an uploaded model or cluster), by field.
    """

    name: str
    words: tuple[str, ...] = ()
    slot: str = ""
    added: tuple[tuple[str, str], ...] = ()

    @property
    def is_upload(self) -> bool:
        """Whether it holds what was uploaded, and so is not all in the address."""
        return self.name == UPLOADED or bool(self.added) or bool(_machines(self.words))

    def base(self) -> Scenario:
        """Returns the scenario before its changes."""
        return _base(self.name, self._upload())

    def scenario(self) -> Scenario:
        """Returns the scenario with its changes.

        Raises:
            InputError: what was uploaded or changed breaks a rule.
        """
        added = (*self.added, *_machines(self.words))
        return _built(self.name, self._upload(), self.words, added)

    def _upload(self) -> Upload | None:
        """Returns the name and bytes of this session's uploaded scenario."""
        if self.name != UPLOADED:
            return None
        found: Upload = st.session_state[f"{self.slot}upload"]
        return found

    def command(self, verb: str, *options: str) -> list[str]:
        """Returns the command line that gives what is shown."""
        if self.is_upload:
            return ["flopwright", verb, f"{self.scenario().name}.yaml", *options]
        changes = [part for word in self.words for part in ("--set", word)]
        return ["flopwright", verb, self.name, *changes, *options]

    def keep(self) -> None:
        """Writes the view into the address."""
        for key, value in (("scenario", [self.name]), ("set", list(self.words))):
            name = f"{self.slot}{key}"
            if st.query_params.get_all(name) != value:
                st.query_params[name] = value
        st.session_state[f"{self.slot}added"] = (self.name, self.words, self.added)

    def remember(self) -> None:
        """Keeps what was uploaded for the pages that show one scenario."""
        st.session_state["added"] = (self.name, self.words, self.added)
        if (upload := self._upload()) is not None:
            st.session_state["upload"] = upload

    def yaml(self) -> str:
        """Returns the scenario as a file of its own."""
        return dump_yaml(self.scenario(), header="Downloaded from the dashboard.")


def _machines(words: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Returns the probed machine that the words name, as it is now, like an uploaded cluster."""
    start = f"cluster={PROBED}"
    names = [word.removeprefix(start) for word in words if word.startswith(start)]
    return tuple(("cluster", dump_yaml(load_machine(name))) for name in names)


# A page asks for its scenario at every turn; reading one takes a tenth of a second.
@lru_cache(maxsize=64)
def _base(name: str, upload: Upload | None) -> Scenario:
    return load_scenario(name) if upload is None else uploaded_scenario(*upload)


@lru_cache(maxsize=64)
def _built(
    name: str,
    upload: Upload | None,
    words: tuple[str, ...],
    added: tuple[tuple[str, str], ...],
) -> Scenario:
    values = dict(parse_changes(words))
    values |= {field: yaml.safe_load(text) for field, text in added}
    return changed(_base(name, upload), values, files=False)


def view_of_address(slot: str = "") -> View | None:
    """Returns the view that the address names, else the session's last one; None without any.

    The links between pages carry no scenario: what was looked at goes along all the same.
    """
    name = st.query_params.get(f"{slot}scenario")
    kept = st.session_state.get(f"{slot}added", ())
    if name is None and kept and not slot:
        return View(kept[0], kept[1], slot, kept[2])
    if name == UPLOADED and f"{slot}upload" not in st.session_state:
        name = None
    if name is None or (name != UPLOADED and name not in catalog_names(SCENARIO_CATALOG)):
        return None
    words = tuple(st.query_params.get_all(f"{slot}set"))
    return View(name, words, slot, kept[2] if kept[:2] == (name, words) else ())


def words_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns changes as words, in the order of their fields."""
    return tuple(f"{field}={_text(values[field])}" for field in sorted(values))


def _text(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("...\n").strip()


def lines(words: Iterable[str]) -> str:
    """Returns words one a line, as the text box for other fields shows them."""
    return "\n".join(words)
