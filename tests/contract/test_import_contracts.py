"""The table of rooms in docs/architecture.md holds: import-linter's contracts are kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import flopwright

REPOSITORY = Path(flopwright.__file__).resolve().parent.parent


@pytest.mark.slow
def test_import_contracts_are_kept() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [str(linter)], cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:]
