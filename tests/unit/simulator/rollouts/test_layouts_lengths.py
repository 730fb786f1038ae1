"""Lengths whose mean after the cut is given."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flopwright.errors import InputError
from flopwright.simulator.rollouts.layouts_lengths import GroupStream, clipped_mean, location_of
from flopwright.spec.rollouts.layout import GroupLengths


@pytest.mark.parametrize(("location", "sigma", "cap"), [(8.0, 0.8, 28_672), (9.5, 1.0, 16_384)])
def test_the_mean_after_the_cut_is_scipys(location: float, sigma: float, cap: float) -> None:
    law = stats.lognorm(s=sigma, scale=np.exp(location))
    expected = law.expect(lambda x: x, ub=cap) + cap * law.sf(cap)
    assert clipped_mean(location, sigma, cap) == pytest.approx(expected, rel=1e-6)


def test_a_mean_is_hit_and_a_cut_share_too() -> None:
    lengths = GroupLengths(mean=22_386, sigma=0.8, cap=65_536)
    assert clipped_mean(location_of(lengths), 0.8, 65_536) == pytest.approx(22_386, rel=1e-9)
    # rl_presets.csv: this shape cuts 4.8 % of the responses
    share = stats.norm.sf((np.log(65_536) - location_of(lengths)) / 0.8)
    assert share == pytest.approx(0.048, abs=0.001)
    cut = GroupLengths(sigma=0.8, cap=16_384, cut_share=0.03)
    assert stats.norm.sf((np.log(16_384) - location_of(cut)) / 0.8) == pytest.approx(0.03)


def test_draws_have_the_mean_and_the_correlation_of_a_group() -> None:
    lengths = GroupLengths(mean=3000, sigma=1.0, cap=10**6, group_share=0.65)
    drawn = GroupStream(lengths, 8, 5).draw(20_000)
    assert drawn.mean() == pytest.approx(3000, rel=0.03)
    logs = np.log(drawn)
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(0.65, abs=0.02)
    assert logs.std() == pytest.approx(1.0, abs=0.02)


def test_same_seed_same_lengths_however_many_at_a_time_and_none_beyond_the_cap() -> None:
    lengths = GroupLengths(mean=500, sigma=1.0, cap=1000)
    whole = GroupStream(lengths, 4, 1).draw(10)
    again = GroupStream(lengths, 4, 1).draw(10)
    assert (whole == again).all()
    assert whole.max() <= 1000


def test_an_unknown_mean_says_what_to_give() -> None:
    with pytest.raises(InputError, match="mean"):
        location_of(GroupLengths(sigma=1.0, cap=100))


@pytest.mark.parametrize(
    "bad",
    [
        {"mean": 200, "sigma": 1.0, "cap": 100},
        {"mean": 50, "sigma": 1.0, "cap": 100, "cut_share": 0.1},
        {"mean": 50, "sigma": 1.0, "cap": 100, "band": [0.2, 0.6]},
    ],
)
def test_lengths_that_cannot_be_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"mean|band"):
        GroupLengths.model_validate(bad)
