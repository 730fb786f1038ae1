"""A loss that is out of line is found in its step; none that falls or scatters is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flopwright.executor.train.spikes import ENOUGH, SIGMAS, WINDOW, Spike, spike_in


def spikes(losses: list[float]) -> list[Spike]:
    """Returns the spikes of a run that goes on after them without their losses."""
    before: list[float] = []
    found = []
    for step, loss in enumerate(losses):
        spike = spike_in(step, loss, 1.0, before)
        if spike is None:
            before.append(loss)
        else:
            found.append(spike)
    return found


def test_a_training_that_goes_well_has_none() -> None:
    rng = np.random.default_rng(0)
    steps = np.arange(4000)
    falling = 2.0 + 8.0 * np.exp(-steps / 300)
    for noise in (rng.normal(0, 0.05, 4000), rng.standard_t(8, 4000) * 0.02):
        assert spikes((falling + noise).tolist()) == []
    assert spikes([3.0] * 100) == []  # no scatter at all


@pytest.mark.parametrize("height", [0.6, 5.0])
def test_a_spike_is_found_where_it_is(height: float) -> None:
    losses = (3.0 + np.random.default_rng(1).normal(0, 0.05, 200)).tolist()
    losses[150] += height
    (spike,) = spikes(losses)
    recent = losses[150 - WINDOW : 150]
    median = float(np.median(recent))
    scatter = 1.4826 / math.sqrt(2) * float(np.median(np.abs(np.diff(recent))))
    assert (spike.step, spike.what, spike.value) == (150, "loss", losses[150])
    assert spike.median == pytest.approx(median)
    assert spike.scatter == pytest.approx(scatter)
    assert spike.bound == pytest.approx(median + SIGMAS * scatter)


def test_losses_that_were_off_do_not_hide_the_next() -> None:
    """A mean and a standard deviation over these would let 4.5 pass."""
    losses = (3.0 + np.random.default_rng(2).normal(0, 0.05, WINDOW)).tolist()
    losses[::8] = [9.0] * (WINDOW // 8)
    mean, deviation = np.mean(losses), np.std(losses)
    assert mean + SIGMAS * deviation > 4.5
    assert spike_in(64, 4.5, 1.0, losses) is not None
    assert spike_in(64, 3.1, 1.0, losses) is None


def test_a_loss_that_falls_fast_hides_nothing() -> None:
    falling = [4.2 - 0.1 * step for step in range(ENOUGH)]
    assert spike_in(ENOUGH, 5.0, 1.0, falling) is not None
    assert spike_in(ENOUGH, 2.7, 1.0, falling) is None


def test_the_first_losses_say_nothing_yet() -> None:
    assert spike_in(ENOUGH - 1, 50.0, 1.0, [3.0] * (ENOUGH - 1)) is None
    assert spike_in(ENOUGH, 50.0, 1.0, [3.0] * ENOUGH) is not None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_a_spike_whatever_came_before(value: float) -> None:
    found = spike_in(0, value, 1.0, ())
    assert found is not None
    assert (found.what, found.bound) == ("loss", math.inf)
    found = spike_in(3, 2.0, value, ())
    assert found is not None
    assert found.what == "gradient norm"
