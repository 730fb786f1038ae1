"""The fit's arrays against the simulator itself, on published runs that ship."""

from __future__ import annotations

import numpy as np
import pytest

from flopwright.simulator.accuracy.features import (
    run_features,
    simulated_step_s,
    stack_arrays,
)
from flopwright.simulator.accuracy.fit_levels import linked
from flopwright.simulator.accuracy.fit_stacks import overlaid
from flopwright.simulator.accuracy.fit_step import SLOT, step_seconds
from flopwright.simulator.accuracy.fit_terms import base_scalars
from flopwright.simulator.accuracy.published_files import load_published
from flopwright.simulator.accuracy.run_of_row import PublishedRun


@pytest.fixture(scope="module")
def runs() -> tuple[PublishedRun, ...]:
    every = load_published().runs
    moe = [r for r in every if r.stack.family == "moe"][::6]
    dense = [r for r in every if r.stack.family == "dense"][::12]
    return tuple((moe + dense)[:12])


def simulated(run: PublishedRun, values: np.ndarray) -> float:
    gpu = run.scenario.cluster.node.gpu
    return simulated_step_s(run, overlaid(run.stack, gpu, values, 0.1))


@pytest.mark.slow
def test_the_arrays_give_the_simulators_own_step(runs: tuple[PublishedRun, ...]) -> None:
    arrays = stack_arrays([run_features(r) for r in runs])
    values = np.tile(linked(base_scalars()), (len(runs), 1))
    own = np.array([simulated(r, v) for r, v in zip(runs, values, strict=True)])
    plain = step_seconds(arrays, values)[0]
    assert np.median(np.abs(plain / own - 1)) < 0.01
    met = arrays.corrected(own, values)
    assert step_seconds(met, values)[0] == pytest.approx(own, rel=1e-9)
    moved = values.copy()
    moved[:, SLOT["x gemm"]] *= 1.06
    moved[:, SLOT["x attention_backward"]] *= 0.95
    moved[:, SLOT["s constant"]] *= 1.5
    moved[:, SLOT["x tp_comm"]] *= 1.05
    again = np.array([simulated(r, v) for r, v in zip(runs, moved, strict=True)])
    assert step_seconds(met, moved)[0] == pytest.approx(again, rel=0.005)


@pytest.mark.slow
def test_padding_changes_no_run(runs: tuple[PublishedRun, ...]) -> None:
    features = [run_features(r) for r in runs[:4]]
    values = np.tile(linked(base_scalars()), (4, 1))
    together = step_seconds(stack_arrays(features), values)[0]
    alone = [step_seconds(stack_arrays([f]), values[:1])[0][0] for f in features]
    assert together == pytest.approx(np.array(alone), rel=1e-12)


def test_stages_hold_the_runs_layers(runs: tuple[PublishedRun, ...]) -> None:
    for run in runs[:6]:
        found = run_features(run)
        held = (found.chunks @ found.layers).sum()
        layers = run.scenario.model.num_layers
        assert layers <= held <= layers * 4 / 3 + 1e-9
