"""The fit under bounds without scipy, against scipy's own."""

from __future__ import annotations

import numpy as np
import pytest

from flopwright.simulator.rollouts.engine.fit import _non_negative
from flopwright.simulator.rollouts.engine.imbalance import largest_of

optimize = pytest.importorskip("scipy.optimize")
special = pytest.importorskip("scipy.special")


@pytest.mark.parametrize("seed", range(50))
def test_it_is_the_bounded_optimum(seed: int) -> None:
    draws = np.random.default_rng(seed)
    system, aims = draws.normal(size=(8, 3)), draws.normal(size=8)
    np.testing.assert_allclose(
        _non_negative(system, aims), optimize.nnls(system, aims)[0], atol=1e-9
    )


@pytest.mark.parametrize("count", [2, 8, 72, 1024])
def test_the_largest_normal_is_bloms(count: int) -> None:
    expected = special.ndtri((count - 0.375) / (count + 0.25))
    assert largest_of(count) == pytest.approx(expected, rel=1e-9)
