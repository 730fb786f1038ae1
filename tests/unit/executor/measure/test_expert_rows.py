"""Rows that experts hold, against counts by hand."""

from __future__ import annotations

import pytest
import torch

from flopwright.executor.measure.expert_rows import ExpertRows
from flopwright.executor.measure.memory import saved_bytes
from flopwright.models.moe.dispatch import Dispatched
from flopwright.models.transformer.module import build_stage, init_weights_
from flopwright.spec.load import load_model


class Uneven:
    """A dispatcher whose rank gets every row and some twice, as a busy rank does."""

    def __init__(self, more: int) -> None:
        self.more = more

    def dispatch(self, rows: torch.Tensor, counts: torch.Tensor) -> Dispatched:
        again = rows[: self.more]
        grown = counts.clone()
        grown[0] += self.more
        return Dispatched(torch.cat([again, rows]), grown, self.more)

    def combine(self, rows: torch.Tensor, handle: int) -> torch.Tensor:
        return rows[handle:]


def loss_of(more: int, passes: int) -> tuple[float, int]:
    spec = load_model("kimi_k2_mini")
    layers = range(-1, spec.num_layers + 1)
    stage = build_stage(
        spec, layers, dispatcher=Uneven(more), dtype=torch.float32, device=torch.device("cpu")
    )
    init_weights_(stage, spec, 0)
    tokens = torch.arange(32).reshape(2, 16)
    with saved_bytes([stage]) as meter:
        out = [stage(tokens).sum() for _ in range(passes)]
        share = meter.peak_rows
        for o in out:
            o.backward()
        assert meter.rows.share() == 1.0  # nothing is held any more
        assert meter.rows.arrived == meter.rows.even == 0
    assert spec.moe is not None
    return share, 32 * spec.moe.top_k


@pytest.mark.parametrize(("more", "passes"), [(0, 1), (8, 1), (8, 2)])
def test_the_share_is_rows_held_over_even_ones(more: int, passes: int) -> None:
    share, even = loss_of(more, passes)
    assert share == pytest.approx(1 + more / even)


def test_a_storage_that_nobody_keeps_is_forgotten() -> None:
    rows = ExpertRows()
    rows.announce(1, 30, 20)
    rows.forget(1)
    rows.keep(1)
    assert rows.share() == 1.0
    rows.announce(2, 30, 20)
    rows.keep(2)
    rows.keep(2)
    assert rows.share() == 1.5
    rows.release(2)
    rows.release(2)
    assert (rows.arrived, rows.even) == (0, 0)
