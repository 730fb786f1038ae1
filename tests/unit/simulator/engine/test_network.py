"""Shared links: processor sharing against closed forms."""

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.simulator.engine.network import Network


def ends(
    capacities: list[float], transfers: list[tuple[float, tuple[tuple[int, float], ...], float]]
) -> list[float]:
    """Returns when transfers (start, path, seconds alone) end."""
    environment = simpy.Environment()
    network = Network(environment, capacities)
    out = [0.0] * len(transfers)

    def send(i: int):
        start, path, seconds = transfers[i]
        yield environment.timeout(start)
        done = environment.event()
        network.start(path, seconds, done.succeed)
        yield done
        out[i] = environment.now

    for i in range(len(transfers)):
        environment.process(send(i))
    environment.run()
    return out


def test_alone_a_transfer_takes_its_own_time() -> None:
    assert ends([1.0], [(2.0, ((0, 1.0),), 3.0)]) == [5.0]


def test_two_at_once_share_and_the_rest_goes_at_full_speed() -> None:
    # Both at half speed until the short one is done at 2; 2 s of the long one are then left.
    assert ends([1.0], [(0.0, ((0, 1.0),), 1.0), (0.0, ((0, 1.0),), 3.0)]) == [2.0, 4.0]
    assert ends([2.0], [(0.0, ((0, 1.0),), 1.0), (0.0, ((0, 1.0),), 3.0)]) == [1.0, 3.0]


def test_a_late_one_slows_an_early_one() -> None:
    found = ends([1.0], [(0.0, ((0, 1.0),), 2.0), (1.0, ((0, 1.0),), 0.5)])
    assert found == pytest.approx([2.5, 2.0])


def test_one_that_stands_for_many_weighs_as_many() -> None:
    assert ends([4.0], [(0.0, ((0, 8.0),), 1.0)]) == [2.0]


def test_the_slowest_of_several_links_paces() -> None:
    path = ((0, 1.0), (1, 3.0))
    assert ends([1.0, 1.0], [(0.0, path, 2.0)]) == [6.0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 5)), min_size=1, max_size=12))
def test_a_busy_link_wastes_nothing(transfers: list[tuple[float, float]]) -> None:
    found = ends([1.0], [(start, ((0, 1.0),), seconds) for start, seconds in transfers])
    # Work conservation: the last end is that of any order of service (Kleinrock 1976).
    clock = 0.0
    for start, seconds in sorted(transfers):
        clock = max(clock, start) + seconds
    assert max(found) == pytest.approx(clock, abs=1e-9)
    alone = np.array([start + seconds for start, seconds in transfers])
    assert (np.array(found) >= alone - 1e-9).all()
