"""Widths judged on plans that were left out, against worlds whose scatter is known."""

from __future__ import annotations

import numpy as np
import pytest

from flopwright.simulator.calibration.class_fit import ClassPrior, learn_classes
from flopwright.simulator.calibration.cross_validation import _scale, widths
from flopwright.simulator.calibration.evidence import CLASSES, Evidence
from flopwright.simulator.calibration.model import Calibration

BASE = Calibration(id="base", created="", source="t")
SECONDS = {"forward": 1.0, "backward": 2.0, "dp_comm": 0.4, "optimizer": 0.3}


def evidence(scatter: float, runs: int, seed: int) -> Evidence:
    """Runs whose classes all take 1.5 times what the curves say, their moods apart."""
    rng = np.random.default_rng(seed)
    mood = rng.normal(0, scatter, runs)
    cls = [CLASSES.index(c) for c in SECONDS]
    seconds = np.zeros((runs, len(CLASSES)))
    seconds[:, cls] = list(SECONDS.values())
    return Evidence(
        run=np.repeat(np.arange(runs), len(cls)),
        cls=np.tile(cls, runs),
        log_measured=np.log(1.5) + np.repeat(mood, len(cls)),
        noise=np.full(runs * len(cls), 0.06),
        seconds=seconds,
        calls=np.zeros_like(seconds),
        log_step=np.log(1.5) + mood,
        step_s=seconds.sum(axis=1),
        run_std=np.full(runs, 0.08),
    )


def scatter_of(scatter: float, runs: int, seed: int = 0, plans: int | None = None) -> float:
    prior, seen = ClassPrior.of(BASE), evidence(scatter, runs, seed)
    learnt = learn_classes(seen, BASE, prior)
    names = [f"p{i % (plans or runs)}" for i in range(runs)]
    _, width = widths(learnt, seen, BASE, prior, names)
    return width / learnt.scatter


def test_quiet_runs_narrow_and_restless_ones_widen() -> None:
    quiet, usual, restless = (scatter_of(s, 8) for s in (0.01, 0.08, 0.3))
    assert quiet < usual < restless
    assert quiet < 0.6
    assert restless > 1.2


def test_runs_of_one_plan_say_nothing_of_others() -> None:
    assert scatter_of(0.01, 6, plans=1) == 1.0
    assert scatter_of(0.01, 6, plans=6) < 1.0


def test_the_scale_is_the_spread_of_what_was_left_out() -> None:
    rng = np.random.default_rng(5)
    for true in (0.3, 1.0, 3.0):
        errors = rng.normal(0, 0.1 * true, 4000)
        found = _scale(errors, np.full(4000, 0.01), np.zeros(4000))
        # outliers beyond 2.5 deviations count as that: 1.4 % of the square is lost
        assert found == pytest.approx(true, rel=0.05)


def test_what_no_run_decides_does_not_count() -> None:
    """Errors that the priors explain say nothing of the scatter."""
    errors = np.random.default_rng(6).normal(0, 1.0, 200)
    assert _scale(errors, np.full(200, 1e-4), np.ones(200)) == pytest.approx(1.0, abs=0.3)


def test_one_run_that_is_off_altogether_widens_little() -> None:
    errors = np.full(12, 0.05)
    clean = _scale(errors, np.full(12, 0.0025), np.zeros(12))
    errors[0] = 2.0
    assert _scale(errors, np.full(12, 0.0025), np.zeros(12)) < 1.6 * clean


def test_scatter_is_at_least_that_of_twins() -> None:
    prior, seen = ClassPrior.of(BASE), evidence(0.01, 6, 0)
    learnt = learn_classes(seen, BASE, prior)
    for plans in ([f"p{i}" for i in range(6)], ["p"] * 6):
        assert widths(learnt, seen, BASE, prior, plans, 0.3)[1] == 0.3
