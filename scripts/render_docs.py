"""Renews the generated pages of docs/ from the code: `make docs`."""

from __future__ import annotations

import runpy
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def main() -> None:
    """Runs each page's own writer."""
    runpy.run_path(str(REPOSITORY / "tests" / "golden" / "golden_render.py"), run_name="__main__")


if __name__ == "__main__":
    main()
