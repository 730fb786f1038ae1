from __future__ import annotations

import pytest

from flopwright.report.probe import OverlapPoint
from flopwright.simulator.calibration.fit_overlap import overlap_slowdowns


def point(name: str, comm_s: float, compute_s: float, both_s: float) -> OverlapPoint:
    return OverlapPoint.model_validate(
        {"collective": name, "ranks": 2, "nbytes": 1.0, "comm_s": comm_s,
         "compute_s": compute_s, "both_s": both_s}
    )  # fmt: skip


@pytest.mark.parametrize(("both_s", "slowdown"), [(5.0, 0.0), (4.0, 0.0), (5.5, 0.25), (7.0, 1.0)])
def test_the_slowdown_is_what_compute_loses_for_a_hidden_second(
    both_s: float, slowdown: float
) -> None:
    assert point("all_reduce", 2.0, 5.0, both_s).slowdown == pytest.approx(slowdown)


def test_classes_take_their_collectives_median_and_never_more_than_all() -> None:
    points = [
        point("all_reduce", 1, 3, 3.2), point("all_gather", 1, 3, 3.4),
        point("reduce_scatter", 1, 3, 3.6), point("all_to_all", 1, 3, 9.0),
    ]  # fmt: skip
    found = overlap_slowdowns(points)
    assert found["dp_comm"] == pytest.approx(0.4)
    assert found["dp_gather"] == pytest.approx(0.4)
    assert found["ep_comm"] == 1.0
    assert overlap_slowdowns([]) == {}
    assert set(overlap_slowdowns(points[3:])) == {"ep_comm"}
