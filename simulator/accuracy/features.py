"""What the simulator prices of a run, as seconds that a fit can scale (fit_step.StepArrays).

One pass at factors of 1, with nothing hidden and no host, holds all that the fit needs: each
scalar multiplies seconds that are there, hides a share of them, or sets a floor under them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flopwright.errors import InputError
from flopwright.ops import Array
from flopwright.simulator.accuracy.fit_stacks import unit_calibration
from flopwright.simulator.accuracy.fit_step import COMMS, ENDS, HOSTS, KERNELS, StepArrays
from flopwright.simulator.accuracy.run_of_row import PublishedRun
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.simulator.training.layers import representatives
from flopwright.simulator.training.predict import plan_costs
from flopwright.simulator.training.stages import PipelineCosts

Advance = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFeatures:
    """One run: its distinct chunks, how stages are made of them, and its step's end.

    Attributes:
        kernel: (D, K); comm: (D, C); layers: (D, 2); chunks: (P, D); end: (P, 4).
        hop: seconds of hops that a step waits for; forward, backward: of one micro-batch.
    """

    kernel: Array
    comm: Array
    layers: Array
    chunks: Array
    end: Array
    microbatches: float
    pp: float
    vpp: float
    hop: float
    forward: float
    backward: float
    norm: float
    dp_ranks: float


def run_features(run: PublishedRun, calibration: Calibration | None = None) -> RunFeatures:
    """Returns the features of a run.

    Args:
        calibration: what it is priced with; None is its stack at factors of 1.

    Raises:
        InputError: what keeps the simulator from pricing it.
    """
    gpu = run.scenario.cluster.node.gpu
    costs = plan_costs(run.scenario, run.plan, calibration or unit_calibration(run.stack, gpu))
    kernel = np.stack([_of_chunks(costs, costs.kernel_s.get(k)) for k in KERNELS], axis=1)
    comm = np.stack([_comm_of_chunks(costs, c) for c in COMMS], axis=1)
    layers = _launched_layers(run, costs)
    everything = np.concatenate([kernel, comm, layers], axis=1)
    _, first, index = np.unique(
        np.round(everything, 12), axis=0, return_index=True, return_inverse=True
    )
    chunks = np.zeros((costs.pp, len(first)))
    for place in costs.stages:
        np.add.at(chunks, (np.arange(costs.pp), index.reshape(-1)[place]), 1.0)
    m = run.plan.num_microbatches(run.scenario.workload.global_batch_size)
    end = costs.end
    ends = [end.reduce_s, end.gather_s, end.update_s, end.offload_s]
    return RunFeatures(
        kernel=kernel[first],
        comm=comm[first],
        layers=layers[first],
        chunks=chunks,
        end=np.stack([e[:, 0] for e in ends], axis=1),
        microbatches=float(m),
        pp=float(costs.pp),
        vpp=float(costs.vpp),
        hop=_hop_seconds(costs, m),
        forward=float(costs.forward_s[: costs.pp, 0].max()),
        backward=float(costs.backward_s[: costs.pp, 0].max()),
        norm=float(end.norm_s[0]),
        dp_ranks=float(run.plan.dp * run.plan.cp),
    )


def simulated_step_s(run: PublishedRun, calibration: Calibration) -> float:
    """Returns the simulator's step time of a run.

    Raises:
        InputError: what keeps the simulator from pricing it.
    """
    candidates = Candidates.from_plans([run.plan])
    return float(evaluate(run.scenario, candidates, calibration).step_time_s[0])


def _of_chunks(costs: PipelineCosts, seconds: Array | None) -> Array:
    if seconds is None:
        return np.zeros(costs.pp * costs.vpp)
    return np.asarray(seconds[:, 0])


def _comm_of_chunks(costs: PipelineCosts, name: str) -> Array:
    cls = "dp_comm" if name == "dp_micro" else name
    both = [side[cls][:, 0] for side in (costs.forward, costs.backward) if cls in side]
    return np.asarray(sum(both)) if both else np.zeros(costs.pp * costs.vpp)


def _launched_layers(run: PublishedRun, costs: PipelineCosts) -> Array:
    """Returns the dense and MoE layers of each chunk as the host launches them, (chunks, 2).

    A layer whose forward runs again counts a third more (stages.py).
    """
    kinds = costs.pick.kinds.astype(float)
    if run.plan.recompute == "full":
        again = costs.pick.kinds if costs.pick.again is None else costs.pick.again
        kinds = kinds + again / 3
    names = list(representatives(run.scenario.model))
    return np.stack(
        [kinds[[i for i, n in enumerate(names) if n.startswith(h)]].sum(axis=0) for h in HOSTS],
        axis=1,
    )


def _hop_seconds(costs: PipelineCosts, microbatches: int) -> float:
    """Returns what a step waits for hops: filling, and without interleaving the round trips."""
    hop = float(costs.send_s[:, 0].max(initial=0.0))
    fill = 2.0 * (costs.pp - 1) * hop
    steady = 0.0 if costs.vpp > 1 else 2.0 * (costs.pp - 1) / costs.pp * hop
    return fill + max(microbatches - costs.pp, 0) * steady


def stack_arrays(features: Sequence[RunFeatures]) -> StepArrays:
    """Returns the features of many runs as padded arrays."""
    kinds = max(len(f.kernel) for f in features)
    stages = max(len(f.chunks) for f in features)

    def padded(name: str, *shape: int) -> NDArray[np.float64]:
        out = np.zeros((len(features), *shape))
        for row, f in enumerate(features):
            values = getattr(f, name)
            out[row][tuple(slice(n) for n in values.shape)] = values
        return out

    def column(name: str) -> Array:
        return np.array([getattr(f, name) for f in features], float)

    return StepArrays(
        kernel=padded("kernel", kinds, len(KERNELS)),
        comm=padded("comm", kinds, len(COMMS)),
        layers=padded("layers", kinds, len(HOSTS)),
        chunks=padded("chunks", stages, kinds),
        end=padded("end", stages, len(ENDS)),
        microbatches=column("microbatches"),
        pp=column("pp"),
        vpp=column("vpp"),
        hop=column("hop"),
        forward=column("forward"),
        backward=column("backward"),
        norm=column("norm"),
        dp_ranks=column("dp_ranks"),
        correction=np.ones(len(features)),
    )


def features_of(
    runs: Sequence[PublishedRun],
    calibration_of: Callable[[PublishedRun], Calibration] | None = None,
    advance: Advance | None = None,
) -> tuple[tuple[PublishedRun, ...], StepArrays, tuple[tuple[str, str], ...]]:
    """Returns (runs that could be priced, their arrays, id and reason of the others)."""
    kept, found, failed = [], [], []
    for done, run in enumerate(runs):
        try:
            found.append(run_features(run, calibration_of(run) if calibration_of else None))
            kept.append(run)
        except InputError as error:
            failed.append((run.id, " ".join(str(error).split())))
        if advance is not None:
            advance(done + 1, len(runs))
    return tuple(kept), stack_arrays(found), tuple(failed)
