"""Step times of many runs as a function of a few scalars, and how they move with each.

What the simulator prices once a run (features.py) is kept as seconds by kernel class and
communication class of each kind of chunk. Scaling those is cheap, so a fit can ask for the
step time of a thousand runs, and its gradient, in a few milliseconds:

    chunk    = max(sum_k factor_k kernel_k + sum_c factor_c (1 - hidden_c) comm_c, host layers)
    stage    = sum of its chunks
    step     = correction (m slowest stage + (p - 1)/v mean stage + end + constant)

The correction is the ratio of the simulator's own step time to this form at the scalars of a
fit before: hops, uneven stages and hidden shares that compute bounds are in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array

KERNELS: Final = (
    "gemm",
    "grouped_gemm",
    "attention",
    "attention_backward",
    "memory_bound",
    "quantize",
    "head",
)
COMMS: Final = ("tp_comm", "cp_comm", "ep_comm", "dp_micro")
HOSTS: Final = ("dense", "moe")
ENDS: Final = ("dp_comm", "gather", "optimizer", "offload")

# Scalars that a run is priced with; "x" multiplies, "hide" is a share, "s" are seconds.
SLOTS: Final = (
    *(f"x {k}" for k in KERNELS),
    *(f"x {c}" for c in COMMS),
    *(f"hide {c}" for c in COMMS),
    *(f"s host {h}" for h in HOSTS),
    "x pp_comm",
    "x dp_comm",
    "hide dp_comm",
    "x optimizer",
    "x offload",
    "s constant",
    "s dp_rank",
)
SLOT: Final = {name: i for i, name in enumerate(SLOTS)}
_K: Final = slice(0, len(KERNELS))
_C: Final = slice(len(KERNELS), len(KERNELS) + len(COMMS))
_H: Final = slice(_C.stop, _C.stop + len(COMMS))
_HOST: Final = slice(_H.stop, _H.stop + len(HOSTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """R runs of up to D kinds of chunks and P stages, in seconds at factors of 1.

    Attributes:
        kernel: forward, backward and recompute of a chunk by kernel class, (R, D, K).
        comm: the same of communication, nothing hidden, (R, D, C).
        layers: transformer layers of a chunk, dense and MoE, (R, D, 2).
        chunks: how many chunks of each kind a stage holds, (R, P, D); stages past pp hold 0.
        microbatches, pp, vpp: (R,).
        hop: seconds of the hops that a step waits for, (R,).
        end: gradient reduction, gathering, optimizer, offload of each stage, (R, P, 4).
        forward, backward: one micro-batch's, behind which gathering and reduction may hide, (R,).
        norm: seconds that are not scaled, (R,).
        dp_ranks: ranks that reduce a gradient together, (R,).
        correction: see the module, (R,).
    """

    kernel: Array
    comm: Array
    layers: Array
    chunks: Array
    microbatches: Array
    pp: Array
    vpp: Array
    hop: Array
    end: Array
    forward: Array
    backward: Array
    norm: Array
    dp_ranks: Array
    correction: Array

    def __len__(self) -> int:
        return len(self.pp)

    def take(self, index: NDArray[Any]) -> StepArrays:
        """Returns the runs at `index` (integers or a mask)."""
        return StepArrays(**{name: getattr(self, name)[index] for name in self.__slots__})

    def corrected(self, simulated_s: Array, values: Array) -> StepArrays:
        """Returns the arrays whose step times at `values` are `simulated_s`."""
        plain = replace(self, correction=np.ones(len(self)))
        return replace(self, correction=simulated_s / step_seconds(plain, values)[0])


def step_seconds(arrays: StepArrays, values: Array) -> tuple[Array, Array]:
    """Returns (step seconds (R,), their derivative by each scalar (R, SLOTS)).

    Args:
        values: scalars of each run in the order of SLOTS, (R, SLOTS).
    """
    a, rows = arrays, np.arange(len(arrays))
    factor, hidden = values[:, _C], np.clip(values[:, _H], 0.0, 1.0)
    kernel = np.einsum("rdk,rk->rd", a.kernel, values[:, _K])
    exposed = a.comm * (1 - hidden)[:, None, :]
    gpu = kernel + np.einsum("rdc,rc->rd", exposed, factor)
    host = np.einsum("rdh,rh->rd", a.layers, values[:, _HOST])
    bound = host > gpu
    stage = np.einsum("rpd,rd->rp", a.chunks, np.where(bound, host, gpu))
    slowest = stage.argmax(axis=1)
    fill = (a.pp - 1) / a.vpp
    # Kinds of chunks, weighted by how often a step runs them one after another.
    times = a.microbatches[:, None] * a.chunks[rows, slowest]
    times = times + (fill / a.pp)[:, None] * a.chunks.sum(axis=1)
    on_gpu, on_host = times * ~bound, times * bound
    gradient = np.zeros(values.shape)
    gradient[:, _K] = np.einsum("rd,rdk->rk", on_gpu, a.kernel)
    gradient[:, _C] = np.einsum("rd,rdc->rc", on_gpu, exposed)
    gradient[:, _H] = -factor * np.einsum("rd,rdc->rc", on_gpu, a.comm)
    gradient[:, _HOST] = np.einsum("rd,rdh->rh", on_host, a.layers)
    _add_ends(a, values, gradient)
    # Linear in all but the hidden shares, which are inside `exposed` already.
    linear = [i for i, name in enumerate(SLOTS) if not name.startswith("hide")]
    seconds = np.einsum("rs,rs->r", gradient[:, linear], values[:, linear]) + a.norm
    return seconds * a.correction, gradient * a.correction[:, None]


def _add_ends(a: StepArrays, values: Array, gradient: Array) -> None:
    """Writes the derivatives by the scalars of a step's end into `gradient`."""
    rows = np.arange(len(a))
    share = np.clip(values[:, SLOT["hide dp_comm"]], 0.0, 1.0)
    factor = values[:, SLOT["x dp_comm"]]
    reduce, gather = a.end[:, :, 0], a.end[:, :, 1]
    open_reduce, bound_reduce = _open(reduce, share, a.backward)
    open_gather, bound_gather = _open(gather, share, a.forward)
    total = factor[:, None] * (reduce * open_reduce + gather * open_gather)
    total = total + values[:, SLOT["x optimizer"], None] * a.end[:, :, 2]
    total = total + values[:, SLOT["x offload"], None] * a.end[:, :, 3]
    worst = (rows, total.argmax(axis=1))
    gradient[:, SLOT["x dp_comm"]] = (reduce * open_reduce + gather * open_gather)[worst]
    hidden = np.where(bound_reduce, 0.0, reduce) + np.where(bound_gather, 0.0, gather)
    gradient[:, SLOT["hide dp_comm"]] = -factor * hidden[worst]
    gradient[:, SLOT["x optimizer"]] = a.end[:, :, 2][worst]
    gradient[:, SLOT["x offload"]] = a.end[:, :, 3][worst]
    gradient[:, SLOT["x pp_comm"]] = a.hop
    gradient[:, SLOT["s constant"]] = 1.0
    gradient[:, SLOT["s dp_rank"]] = a.dp_ranks


def _open(seconds: Array, share: Array, compute_s: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Returns (share of the seconds that is exposed, where compute bounds what is hidden)."""
    least = 1 - compute_s[:, None] / np.maximum(seconds, 1e-12)
    return np.maximum(1 - share[:, None], least), least > 1 - share[:, None]
