"""Compiles every Triton kernel for four targets without a GPU; what each takes, as a table.

    python benchmarks/kernel_resources.py --write docs/kernels.md
    python benchmarks/kernel_resources.py --only grouped_gemm --target sm_90

One JSON object is the last line. `--write` renews the part of the page between its marks.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from flopwright.kernels.resources import COMPILED_FOR, compile_row, rows


def main() -> None:
    """Compiles what is asked for and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="folders of kernels/")
    parser.add_argument("--target", nargs="*", default=list(COMPILED_FOR))
    parser.add_argument("--write", type=Path, help="page whose table to renew")
    options = parser.parse_args()
    start, table = time.perf_counter(), rows(options.target, options.only)
    for row in table:
        began = time.perf_counter()
        compile_row(row)
        took = time.perf_counter() - began
        r = row.found
        if r is None:
            print(
                f"{row.group:14} {row.target:7} {'+'.join(row.models):10} refused: {row.refused}"
            )
            continue
        print(
            f"{r.kernel:24} {r.target:7} {'+'.join(row.models):16} registers {r.registers:4} "
            f"spills {r.spill_bytes:6} shared {r.shared_bytes / 1024:6.1f} KiB warps "
            f"{r.num_warps} {r.tensor_core:8} {took:5.1f} s", flush=True,
        )  # fmt: skip
    if options.write:
        from flopwright.kernels.resources import render_into

        render_into(options.write, table)
    result = {
        "kernels": [asdict(r.found) for r in table if r.found is not None],
        "refused": sorted({f"{r.group} {r.target}" for r in table if r.refused}),
        "seconds": time.perf_counter() - start,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
