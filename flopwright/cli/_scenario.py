"""The scenario of a verb: a file or a shipped one, with fields changed by --set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from flopwright.spec.scenario import Scenario

SET_HELP: Final = "Change a field, e.g. cluster=64_h100 or workload.seq_len=8192; repeat it."


def scenario_of(name: str, changes: Sequence[str] | None = None) -> Scenario:
    """Returns the named scenario with the `FIELD=VALUE` changes made.

    Raises:
        InputError: every violation of the file, or of the changes.
    """
    from flopwright.spec.changed import changed, parse_changes
    from flopwright.spec.load import load_scenario

    return changed(load_scenario(name), parse_changes(changes or ()))
