"""Fits the curves of simulator/hardware/links/ to tables of measured collectives.

    python scripts/fit_links.py FOLDER [--out DIR]

FOLDER holds operators/{collectives,moe_alltoall}.parquet (NVIDIA AIConfigurator, condensed)
and validation/kernels_and_links.csv. Curves inside a node come from the tables, those between
nodes from published runs of four nodes and more: two nodes overstate a fabric. Each curve has
three numbers (base_s, share, ramp_bytes), fitted by non-negative least squares on relative
errors; the share cannot exceed the link.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from fit_links_between import between_nodes, derived
from fit_links_tables import inside_nodes

HERE: Final = Path(__file__).resolve().parents[1]


def main() -> None:
    """Fits, writes, and prints the held-out errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=HERE / "simulator" / "hardware" / "links")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    scores = inside_nodes(given.folder, given.out)
    derived(given.folder, given.out)
    between_nodes(given.folder, given.out)
    print(scores.round(3).to_string(index=False))


if __name__ == "__main__":
    main()
