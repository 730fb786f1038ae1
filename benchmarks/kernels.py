"""Every kernel against torch, its library rival and the least time that the card allows.

    python benchmarks/kernels.py --out benchmarks/results/kernels.json --choose

One JSON object is the last line: a row for each op, shape and contender, and which of our own
and the library's kernel the dispatcher should take on this card. `--choose` writes that into
kernels/choices.json. Without a GPU the same code runs tiny shapes on one CPU core, where every
contender of ours is the reference: a trial of the benchmark, no measurement of a kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from flopwright.kernels.checks.contenders import Maker
from flopwright.kernels.checks.speed import MAKERS
from flopwright.kernels.checks.timing import Floor, choices, time_all
from flopwright.kernels.dispatch import CHOICES
from flopwright.simulator.accuracy.gpu_names import canonical_gpu
from flopwright.simulator.hardware.nodes.types import cluster_of, usual_node_type

TRIAL_SCALE = 64


def floor_of(card: str) -> Floor | None:
    """Returns the datasheet's peaks of a card in the catalog."""
    gpu = canonical_gpu(card)
    if gpu is None:
        return None
    sheet = cluster_of(usual_node_type(gpu), 1).node.gpu
    return Floor(sheet.peak_flops_per_s["bf16"], sheet.hbm_bytes_per_s)


def measure(device: torch.device, budget_s: float) -> dict[str, Any]:
    """Returns the rows, the choices and where they come from."""
    real = device.type == "cuda"
    card = torch.cuda.get_device_name(device) if real else "cpu"
    maker = Maker(device, torch.bfloat16 if real else torch.float32, 1 if real else TRIAL_SCALE)
    deadline = time.monotonic() + budget_s
    rows = list(time_all(maker, MAKERS, floor_of(card) if real else None, deadline))
    when = datetime.now(UTC).date().isoformat()
    result = {
        "card": card,
        "date": when,
        "torch": torch.__version__,
        "measured_on_a_gpu": real,
        "rows": rows,
        "choices": choices(rows, f"measured {when}") if real else {},
    }
    if not real:
        result["note"] = "not measured on a GPU: a trial of the benchmark on a CPU"
    return result


def keep(result: dict[str, Any]) -> None:
    """Adds the choices to kernels/choices.json."""
    known = json.loads(CHOICES.read_text(encoding="utf-8")) if CHOICES.is_file() else {}
    for op, choice in result["choices"].items():
        known.setdefault(op, {})[result["card"]] = choice
    CHOICES.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--budget", type=float, default=240.0, help="seconds to spend")
    parser.add_argument("--choose", action="store_true", help="write kernels/choices.json")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        sys.exit("kernels: no CUDA device here; --device cpu tries the benchmark")
    torch.set_num_threads(1)
    result = measure(torch.device(kind, 0) if kind == "cuda" else torch.device("cpu"),
                     options.budget)  # fmt: skip
    for row in result["rows"]:
        times = [f"{k} {row[k] * 1e3:.3f} ms" for k in ("forward_s", "both_s") if k in row]
        print(f"{row['op']:22} {row['shape']:48} {row['kernel']:16}", *times, row.get("error", ""))
    if options.choose and result["choices"]:
        keep(result)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
