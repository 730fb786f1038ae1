"""What a search asks of every candidate: a bound on its step, its peak, its host memory.

`evaluate` tells all classes of time and memory of every stage; hundreds of thousands of
candidates would take gigabytes. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from flopwright.ops import Array
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.memory.stages import StagePeaks
from flopwright.simulator.training.blocks import price_blocks
from flopwright.simulator.training.candidates import Candidates, Ints
from flopwright.simulator.training.check import check_candidates
from flopwright.simulator.training.combos import shard_combos
from flopwright.simulator.training.evaluate import (
    peaks_of,
    same_pipeline,
    step_bound_s,
)
from flopwright.simulator.training.stages import pipeline_costs
from flopwright.spec.scenario import Scenario

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Results by candidate, (C,).

    Attributes:
        step_time_s: never exceeds the replay's.
        peak_bytes: all memory classes of the fullest stage, which is `peak_stage`.
        host_bytes: host memory that one node needs.
    """

    step_time_s: Array
    peak_bytes: Array
    peak_stage: Ints
    host_bytes: Array


def bounds(
    scenario: Scenario,
    candidates: Candidates,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> Bounds:
    """Returns a bound on the step, the peak and the host memory of every candidate.

    Args:
        progress: called with (priced, total) after each pipeline.

    Raises:
        InputError: candidates that the batch, the model or the cluster rules out.
    """
    check_candidates(scenario, candidates)
    calibration = calibration or default_calibration(scenario.cluster.node.gpu)
    combos = shard_combos(candidates)
    blocks = price_blocks(scenario, combos, calibration)
    count = len(candidates)
    groups = list(same_pipeline(candidates))
    every = np.concatenate(groups) if groups else np.zeros(0, np.int64)
    # Candidates of one pipeline side by side: a group is then a view.
    sorted_, index = candidates.take(every), combos.index[every]
    step, peak, host = np.zeros(count), np.zeros(count), np.zeros(count)
    stage = np.zeros(count, np.int64)
    stop = 0
    for group in groups:
        start, stop = stop, stop + len(group)
        mine = sorted_.part(start, stop)
        few = replace(combos, index=index[start:stop])
        costs = pipeline_costs(scenario, mine, few, blocks, calibration)
        m = mine.num_microbatches(scenario.workload.global_batch_size)
        step[group] = step_bound_s(costs, m)
        found: StagePeaks = peaks_of(scenario, costs, calibration)
        peak[group], stage[group] = found.peak_bytes, found.stage
        host[group] = found.host_bytes * scenario.cluster.node.gpus
        if progress is not None:
            progress(stop, count)
    return Bounds(step_time_s=step, peak_bytes=peak, peak_stage=stage, host_bytes=host)
