"""The terms of the fit: which scalars of a step belong to a kernel, a processor, a link, a stack.

Spreads are those of a prior: how far one such thing is expected to lie from its like, in
logarithms (logits for hidden shares). They are the same for all of a level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from flopwright.ops import Array
from flopwright.simulator.accuracy.fit_levels import Term, unlinked
from flopwright.simulator.accuracy.fit_step import COMMS, HOSTS, KERNELS, SLOTS
from flopwright.simulator.accuracy.run_of_row import PublishedRun
from flopwright.simulator.accuracy.stack_of_row import StackKey
from flopwright.spec.cluster import GpuSpec

# Flag of runs whose rows were composed, not measured one by one.
COMPOSED: Final = "vtrain-single"
_COMPUTE: Final = tuple(f"x {k}" for k in KERNELS)
_PRODUCTS: Final = ("x gemm", "x grouped_gemm", "x head")
_HOST: Final = tuple(f"s host {h}" for h in HOSTS)

# What a scalar is where nothing more is known; "x" not named is 1, "hide" not named 0.02.
_BASE: Final[Mapping[str, float]] = {
    "hide tp_comm": 0.3,
    "hide ep_comm": 0.3,
    "hide dp_comm": 0.6,
    "hide dp_micro": 0.9,
    "s host dense": 2.0e-3,
    "s host moe": 6.0e-3,
    "s constant": 0.02,
    "s dp_rank": 1.0e-6,
}

TERMS: Final = (
    *(Term(level=f"kernel {k}", slots=(f"x {k}",), by="", std=0.2) for k in KERNELS),
    # Where tensor parallelism is, its factor and its hidden share say nearly the same: the
    # collectives were measured by themselves, so the share takes more of it, and an unseen
    # framework hides what the others have in common.
    Term(level="comm tp_comm", slots=("x tp_comm",), by="", std=0.2),
    *(Term(level=f"comm {c}", slots=(f"x {c}",), by="", std=0.3) for c in COMMS[1:-1]),
    Term(level="comm dp_comm", slots=("x dp_comm", "x dp_micro"), by="", std=0.3),
    Term(level="comm pp_comm", slots=("x pp_comm",), by="", std=0.3),
    Term(level="processor", slots=_COMPUTE, by="gpu", std=0.1),
    Term(level="recipe", slots=_PRODUCTS, by="recipe", std=0.2),
    Term(level="family", slots=_COMPUTE, by="family", std=0.1),
    Term(level="framework", slots=_COMPUTE, by="framework", std=0.12),
    Term(level="stack", slots=_COMPUTE, by="stack", std=0.08),
    Term(level="stack processor", slots=_COMPUTE, by="stack_gpu", std=0.06),
    Term(level="tp hidden", slots=("hide tp_comm",), by="", std=1.0),
    Term(level="framework tp hidden", slots=("hide tp_comm",), by="framework", std=1.5),
    Term(level="ep hidden", slots=("hide ep_comm",), by="stack", std=1.0),
    Term(level="framework dp hidden", slots=("hide dp_comm", "hide dp_micro"), by="framework",
         std=1.0),
    Term(level="framework host", slots=_HOST, by="framework", std=0.4),
    Term(level="graphs host", slots=_HOST, by="graphs", std=0.5),
    Term(level="stack host", slots=_HOST, by="stack", std=0.3),
    Term(level="framework constant", slots=("s constant",), by="framework", std=0.7),
    Term(level="dp rank", slots=("s dp_rank",), by="", std=1.0),
)  # fmt: skip


def base_scalars() -> Array:
    """Returns the scalars of a run about which nothing is known, before their links."""
    values = [
        _BASE.get(n, 1.0 if n.startswith("x") else 0.02 if n.startswith("hide") else 1e-12)
        for n in SLOTS
    ]
    return unlinked(np.array(values))


def fit_labels(stack: StackKey, gpu: GpuSpec, recipe: str) -> dict[str, str]:
    """Returns what the terms tell runs apart by.

    Args:
        recipe: `workload.precision.gemm`.
    """
    name = stack.label()
    return {
        "gpu": gpu.name,
        "family": stack.family,
        "framework": f"{stack.framework}-{stack.family}",
        "stack": name,
        "stack_gpu": f"{name}+{gpu.name}",
        "graphs": "graphs" if stack.graphs else "",
        "recipe": "" if recipe == "same" else f"{architecture(gpu)}-{recipe}",
    }


def run_labels(run: PublishedRun) -> dict[str, str]:
    """Returns fit_labels of a published run.

    Rows that were composed from a few measurements are a stack of their own: what they leave
    out of a step is not what any software does.
    """
    gpu = run.scenario.cluster.node.gpu
    labels = fit_labels(run.stack, gpu, run.scenario.workload.precision.gemm)
    if COMPOSED in run.flags:
        for name in ("framework", "stack", "stack_gpu"):
            labels[name] += "-composed"
    return labels


def architecture(gpu: GpuSpec) -> str:
    """Returns the generation of a processor, told by its name and the formats it multiplies."""
    name = gpu.name.lower()
    if name.startswith("mi"):
        return "cdna3"
    if "fp4" in gpu.peak_flops_per_s:
        return "blackwell"
    if "fp8" in gpu.peak_flops_per_s:
        return "ada" if name.startswith(("l40", "rtx_4")) else "hopper"
    return "ampere"


def weight_of(cell_size: int) -> float:
    """Returns the weight of a run whose cell has so many: a cell counts by its root.

    Runs of one cell share what the model of it gets wrong.
    """
    return 1.0 / math.sqrt(cell_size)
