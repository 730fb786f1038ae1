"""Renews the committed snapshot of predictions; CHANGELOG.md must say why they moved.

Usage: python scripts/renew_predictions.py "why the predictions moved"

The reason has to stand, word for word, in CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flopwright.simulator.accuracy.snapshot import (
    moved,
    predictions_now,
    read_snapshot,
    snapshot_text,
)
from flopwright.simulator.calibration.files import write_atomically

REPOSITORY = Path(__file__).resolve().parent.parent
SNAPSHOT = REPOSITORY / "tests" / "accuracy" / "predictions.json"
CHANGELOG = REPOSITORY / "CHANGELOG.md"
_LEAST_WORDS = 3


def main() -> None:
    """Checks the reason, prints what moved and writes the snapshot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reason", help="a line of CHANGELOG.md")
    reason = " ".join(parser.parse_args().reason.split())
    said = " ".join(CHANGELOG.read_text(encoding="utf-8").split())
    if len(reason.split()) < _LEAST_WORDS or reason not in said:
        sys.exit(f"CHANGELOG.md does not say {reason!r}: write there why the predictions moved")
    now = predictions_now()
    before = read_snapshot(SNAPSHOT) if SNAPSHOT.is_file() else {}
    for change in moved(before, now):
        print(change.text())
    write_atomically(SNAPSHOT, snapshot_text(now))
    print(f"{len(now)} predictions: {SNAPSHOT.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
