"""No change moves a prediction unnoticed."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from flopwright.simulator.accuracy.snapshot import (
    Entry,
    moved,
    predictions_now,
    read_snapshot,
    snapshot_text,
)

SNAPSHOT = Path(__file__).with_name("predictions.json")
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "renew_predictions.py"


@pytest.mark.slow
def test_predictions_are_those_of_the_snapshot() -> None:
    changes = moved(read_snapshot(SNAPSHOT), predictions_now())
    lines = "\n".join(change.text() for change in changes[:20])
    assert not changes, (
        f"{len(changes)} predictions moved:\n{lines}\n"
        "If they should: write why in CHANGELOG.md, then "
        "python scripts/renew_predictions.py 'that line'"
    )


def test_the_grid_is_wide() -> None:
    names = [name.split(" | ") for name in read_snapshot(SNAPSHOT)]
    assert 150 <= len(names) <= 400
    assert len({n[0] for n in names}) >= 6
    assert len({n[1] for n in names}) >= 6


def test_moves_beyond_half_a_percent_are_told_and_smaller_ones_are_not() -> None:
    before = {"a": Entry(1.0, 10.0), "b": Entry(2.0, 20.0), "gone": Entry(1.0, 1.0)}
    after = {"a": Entry(1.0049, 9.96), "b": Entry(2.02, 20.0), "new": Entry(1.0, 1.0)}
    found = moved(before, after)
    assert [c.text() for c in found] == ["b: step_time_s +1.00%", "gone: gone", "new: new"]


def test_a_snapshot_reads_back(tmp_path: Path) -> None:
    entries = {"x | y": Entry(0.123456, 1.5e10), "a": Entry(3.0, 4.0)}
    path = tmp_path / "s.json"
    path.write_text(snapshot_text(entries))
    assert read_snapshot(path) == entries


@pytest.mark.parametrize("reason", ["", "short one", "a reason that nobody wrote down anywhere"])
def test_it_is_not_renewed_without_a_reason_in_the_changelog(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = SNAPSHOT.read_bytes()
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), reason])
    with pytest.raises(SystemExit, match=r"CHANGELOG\.md does not say"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert SNAPSHOT.read_bytes() == kept
