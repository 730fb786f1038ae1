"""A run whose loss or gradient norm is no number ends, and says where."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flopwright.errors import InputError
from flopwright.executor.train import guard
from flopwright.executor.train.spikes import Spike


def _row(step: int, loss: float, norm: float = 1.0) -> Any:
    return SimpleNamespace(step=step, loss=loss, gradient_norm=norm)


def _refuse(
    rows: list[Any], monkeypatch: pytest.MonkeyPatch, own: tuple[float | None, ...]
) -> None:
    """Asks as rank 1 of as many ranks as `own` has, whose own losses are those."""
    told = [json.dumps(loss).encode() for loss in own]
    monkeypatch.setattr(guard, "gather_bytes", lambda *_: told)
    trial = SimpleNamespace(
        entry=SimpleNamespace(name="dp2"), groups=SimpleNamespace(world=None), device="cpu"
    )
    records = [SimpleNamespace(loss=torch.tensor(row.loss)) for row in rows]
    guard.refuse_not_finite(trial, rows, records)  # type: ignore[arg-type]


def test_numbers_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "gather_bytes", lambda *_: pytest.fail("nobody is asked"))
    trial: Any = SimpleNamespace()
    guard.refuse_not_finite(trial, [_row(1, 3.0), _row(2, 1e30)], [trial, trial])


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_the_first_bad_step_and_its_ranks_are_named(
    loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [_row(7, 3.0), _row(8, loss), _row(9, math.nan)]
    with pytest.raises(InputError) as caught:
        _refuse(rows, monkeypatch, (2.0, loss))
    text = str(caught.value)
    assert "loss" in text
    assert str(loss) in text
    assert "step 8 of plan 'dp2' (its own on rank 1)" in text


def test_a_bad_norm_of_a_good_loss_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"gradient norm.*step 4 of plan 'dp2'") as caught:
        _refuse([_row(4, 2.0, math.inf)], monkeypatch, (2.0, None))
    assert "rank" not in str(caught.value)


def test_the_ranks_of_a_spike_are_those_above_its_bound() -> None:
    spike = Spike(41, "loss", 9.3, 3.0, 0.25)
    text = guard.spike_text(spike, "dp4", {0: 3.1, 1: 14.0, 2: 4.9, 3: 15.0})
    assert text == (
        "is a spike in step 41 of plan 'dp4' (its own on ranks 1, 3): the median of the steps "
        "before it is 3, their scatter 0.25"
    )


def test_weights_that_are_no_numbers_are_named_with_their_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = [("embed.weight", 1.0), ("norm.weight", math.nan), ("head.weight", math.inf)]
    parts = [
        SimpleNamespace(held=SimpleNamespace(name=name), updated=torch.tensor([0.5, value]))
        for name, value in held
    ]
    asked: list[bytes] = []

    def gather(mine: bytes, *_: Any) -> list[bytes]:
        asked.append(mine)
        return [b"null", mine, b"null", b'"head.weight"']

    monkeypatch.setattr(guard, "gather_bytes", gather)
    trial: Any = SimpleNamespace(
        entry=SimpleNamespace(name="dp4"),
        groups=SimpleNamespace(world=None),
        device="cpu",
        data_parallel=SimpleNamespace(state_parts=lambda: iter(parts)),
    )
    found = guard.not_finite(trial)
    assert asked == [b'"norm.weight"']
    assert found == {1: "norm.weight", 3: "head.weight"}
    text = str(guard.unsavable(trial, found, 12))
    assert "norm.weight" in text
    assert "is not finite on ranks 1, 3 after 12 steps of plan 'dp4'" in text
