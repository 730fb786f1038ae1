"""The step of the fit against a step worked by hand and numerical derivatives."""

from __future__ import annotations

import numpy as np
import pytest

from flopwright.ops import Array
from flopwright.simulator.accuracy.fit_step import (
    COMMS,
    ENDS,
    KERNELS,
    SLOT,
    SLOTS,
    StepArrays,
    step_seconds,
)


def arrays(runs: int = 1, kinds: int = 2, stages: int = 2) -> StepArrays:
    zero = np.zeros
    return StepArrays(
        kernel=zero((runs, kinds, len(KERNELS))),
        comm=zero((runs, kinds, len(COMMS))),
        layers=zero((runs, kinds, 2)),
        chunks=zero((runs, stages, kinds)),
        microbatches=np.ones(runs),
        pp=np.full(runs, float(stages)),
        vpp=np.ones(runs),
        hop=zero(runs),
        end=zero((runs, stages, len(ENDS))),
        forward=zero(runs),
        backward=zero(runs),
        norm=zero(runs),
        dp_ranks=zero(runs),
        correction=np.ones(runs),
    )


def values(runs: int = 1, **given: float) -> Array:
    out = np.zeros((runs, len(SLOTS)))
    for name, i in SLOT.items():
        out[:, i] = 1.0 if name.startswith("x ") else 0.0
    for name, value in given.items():
        out[:, SLOT[name.replace("_of_", " ")]] = value
    return out


def test_two_stages_by_hand() -> None:
    a = arrays()
    a.kernel[0, 0, 0], a.kernel[0, 1, 0] = 2.0, 3.0  # seconds of GEMMs of the two chunks
    a.comm[0, 1, 0] = 1.0
    a.chunks[0] = np.eye(2)
    a.microbatches[:] = 8
    a.end[0, :, 0] = [0.5, 0.7]
    a.backward[:] = 10.0
    given = values()
    given[0, SLOT["hide tp_comm"]] = 0.25
    given[0, SLOT["hide dp_comm"]] = 0.5
    given[0, SLOT["s constant"]] = 0.1
    # stages 2 and 3.75; 8 x 3.75, one bubble of the mean, half of 0.7, the constant
    expected = 8 * 3.75 + (2 + 3.75) / 2 + 0.35 + 0.1
    assert step_seconds(a, given)[0] == pytest.approx([expected])


def test_a_host_slower_than_the_gpu_sets_the_pace_of_its_chunk() -> None:
    a = arrays(kinds=1, stages=1)
    a.kernel[0, 0, 0], a.layers[0, 0, 0], a.chunks[0, 0, 0] = 2.0, 10.0, 1.0
    slow, fast = values(), values()
    slow[0, SLOT["s host dense"]], fast[0, SLOT["s host dense"]] = 0.3, 0.1
    assert step_seconds(a, slow)[0] == pytest.approx([3.0])
    assert step_seconds(a, fast)[0] == pytest.approx([2.0])


def test_a_reduction_longer_than_the_backward_is_hidden_by_no_more_than_it() -> None:
    a = arrays(kinds=1, stages=1)
    a.end[0, 0, 0] = 10.0
    a.backward[:] = 2.0
    given = values()
    given[0, SLOT["hide dp_comm"]] = 0.9
    assert step_seconds(a, given)[0] == pytest.approx([8.0])


def test_derivatives_are_the_numerical_ones() -> None:
    rng = np.random.default_rng(5)
    runs, kinds, stages = 6, 3, 4
    a = arrays(runs, kinds, stages)
    for name in ("kernel", "comm", "layers", "end"):
        getattr(a, name)[...] = rng.uniform(0.1, 1.0, getattr(a, name).shape)
    a.chunks[...] = rng.integers(0, 3, a.chunks.shape)
    a.microbatches[:] = rng.integers(1, 9, runs)
    a.vpp[:] = rng.integers(1, 3, runs)
    for name in ("hop", "norm", "dp_ranks", "correction", "forward", "backward"):
        getattr(a, name)[:] = rng.uniform(0.5, 1.5, runs)
    at = rng.uniform(0.2, 0.8, (runs, len(SLOTS)))
    _, gradient = step_seconds(a, at)
    for i in range(len(SLOTS)):
        move = np.zeros(at.shape)
        move[:, i] = 1e-6
        slope = (step_seconds(a, at + move)[0] - step_seconds(a, at - move)[0]) / 2e-6
        assert gradient[:, i] == pytest.approx(slope, rel=1e-5, abs=1e-7), SLOTS[i]


def test_a_correction_meets_the_simulated_step() -> None:
    a = arrays(kinds=1, stages=1)
    a.kernel[0, 0, 0], a.chunks[0, 0, 0] = 2.0, 1.0
    met = a.corrected(np.array([2.4]), values())
    assert step_seconds(met, values())[0] == pytest.approx([2.4])
    assert step_seconds(met.take(np.array([0])), values())[0] == pytest.approx([2.4])
