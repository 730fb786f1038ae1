"""In-flight micro-batches: closed forms against running the lists."""

import numpy as np
import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import ActionKind
from flopwright.plan.schedules.placement import chunk_table, fewest_microbatches
from flopwright.plan.schedules.registry import compute_actions
from flopwright.simulator.memory.in_flight import in_flight


def _peak_bytes(schedule: str, pp: int, vpp: int, m: int, sizes: list[int]) -> list[int]:
    """Runs each stage's list and returns the most bytes it ever holds; sizes by chunk."""
    out = []
    for actions in compute_actions(ParallelPlan(pp=pp, vpp=vpp, schedule=schedule), m):
        held = peak = 0
        for action in actions:
            size = sizes[action.chunk]
            if action.kind is ActionKind.BACKWARD_INPUT:
                continue  # the weights' gradients still need it
            held += size if action.kind is ActionKind.FORWARD else -size
            peak = max(peak, held)
        assert held == 0
        out.append(peak)
    return out


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3, 9])
@pytest.mark.parametrize(
    ("schedule", "vpp"),
    [
        ("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4),
        ("interleaved_1f1b_overlap", 2), ("zb_h1", 1), ("zb_h1", 2), ("zb_v", 2),
        ("dualpipe_v", 2),
    ],
)  # fmt: skip
def test_the_fullest_mixture_is_the_fullest_moment(
    schedule: str, vpp: int, pp: int, rounds: int
) -> None:
    m = max(rounds * pp, fewest_microbatches(schedule, pp))
    sizes = [1 + (7 * c) % 5 for c in range(pp * vpp)]  # chunks of unlike size
    peaks = _peak_bytes(schedule, pp, vpp, m, sizes)
    places = np.array(chunk_table(schedule, pp, vpp))
    for stage, mixtures in enumerate(in_flight(schedule, pp, vpp, m)):
        mine = np.array(sizes)[places[:, stage]]
        assert (mixtures @ mine).max() == peaks[stage]


def test_one_forward_one_backward_holds_pp_minus_stage() -> None:
    assert [int(c.max()) for c in in_flight("1f1b", 8, 1, 64)] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [int(c.max()) for c in in_flight("1f1b", 8, 1, 3)] == [3, 3, 3, 3, 3, 3, 2, 1]


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 2), (8, 4), (16, 2)])
def test_interleaving_holds_megatrons_number_of_chunks(pp: int, vpp: int) -> None:
    for stage, mixtures in enumerate(in_flight("interleaved_1f1b", pp, vpp, 8 * pp)):
        assert mixtures.sum(axis=1).max() == 2 * (pp - stage - 1) + (vpp - 1) * pp + 1


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_zero_bubble_schedules_hold_what_their_papers_say(pp: int) -> None:
    """ZB-H1 and ZB-V as much as 1F1B's first stage (arXiv 2401.10241), halves counted as such."""
    m = 4 * pp
    assert {int(x.sum(axis=1).max()) for x in in_flight("zb_h1", pp, 1, m)} == {pp}
    assert {int(x.sum(axis=1).max()) for x in in_flight("zb_v", pp, 2, m)} == {2 * pp}
    assert {int(x.sum(axis=1).max()) for x in in_flight("dualpipe_v", pp, 2, m)} == {2 * pp + 1}
