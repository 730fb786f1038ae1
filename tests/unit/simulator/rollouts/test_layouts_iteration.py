"""Layouts against closed forms and limits: splits, staleness, overlap, conservation."""

from __future__ import annotations

from typing import Any

import pytest

from flopwright.simulator.rollouts.layouts import IterationReport, iteration
from flopwright.simulator.rollouts.layouts_async import run_async
from flopwright.simulator.rollouts.layouts_identity import (
    best_rollout_share,
    loop_rate,
    queue_staleness,
    split_rate,
)
from flopwright.spec.rollouts.engine import EngineModel, PrefillTable, StepTable
from flopwright.spec.rollouts.layout import LayoutInput

TOKEN_S = 1e-3  # an engine makes a token in so long, whatever its batch: no step cost


def _given(layout: dict[str, Any], **changes: Any) -> LayoutInput:
    engine = EngineModel(
        decode=changes.pop("decode", StepTable.linear(0.01, 1e-5, 0.0)),
        prefill=PrefillTable(per_token=changes.pop("per_token", 0.0)),
        max_running=512,
    )
    data: dict[str, Any] = {
        "batch": {
            "prompts": changes.pop("prompts", 32),
            "samples": 2,
            "prompt_tokens": 10,
            "lengths": {"mean": 200, "sigma": changes.pop("sigma", 0.8), "cap": 2000},
        },
        "fleet": {"engine": engine.to_data(), "instances": changes.pop("instances", 4)},
        "times": {"update": f"{changes.pop('update', 5.0)} s", "sync": "0 s"},
        "layout": layout,
    }
    assert not changes
    return LayoutInput.model_validate(data)


def _iterate(layout: dict[str, Any], **changes: Any) -> IterationReport:
    return iteration(_given(layout, **changes))


ASYNC = {"kind": "async", "staleness": 4, "max_in_flight": 32}


def test_the_best_split_is_as_fast_as_taking_turns() -> None:
    r, t, gpus = 300.0, 700.0, 64.0
    share = best_rollout_share(r, t)
    assert share == pytest.approx(0.7)
    in_turns = 1 / (1 / (gpus * r) + 1 / (gpus * t))
    assert split_rate(gpus, share, r, t) == pytest.approx(in_turns)
    assert loop_rate(gpus, r, t) == pytest.approx(in_turns)
    assert all(split_rate(gpus, f, r, t) < in_turns for f in (share - 0.1, share + 0.1))


def test_a_simulated_split_without_tail_switch_and_sync_keeps_that_rate() -> None:
    """Pure token cost and equal lengths: an engine's rate is 1 / TOKEN_S whatever it holds."""
    decode = StepTable.linear(0.0, TOKEN_S, 0.0)
    batch_tokens = 64 * 200
    # two engines generate what the trainer takes as long for: f* of four GPUs is a half
    training_s = batch_tokens * TOKEN_S / 2
    split = _iterate(
        {"kind": "async", "staleness": 8, "max_in_flight": 64},
        decode=decode, sigma=0.0, instances=2, update=training_s,
    )  # fmt: skip
    turns = _iterate(
        {"kind": "colocated"}, decode=decode, sigma=0.0, instances=4, update=training_s / 2
    )
    assert split.step_s == pytest.approx(turns.step_s, rel=0.02)


def test_eta_zero_is_the_synchronous_split() -> None:
    sync = _iterate({"kind": "sync_split"}, sigma=0.0)
    zero = _iterate({"kind": "async", "staleness": 0, "max_in_flight": 1000}, sigma=0.0)
    assert zero.step_s == pytest.approx(sync.step_s)
    spread = _iterate({"kind": "async", "staleness": 0, "max_in_flight": 1000})
    assert spread.staleness == spread.most_stale == 0


def test_a_large_eta_runs_at_the_slower_side() -> None:
    trainer = _iterate({**ASYNC, "staleness": 50}, update=60.0, sigma=0.0)
    assert trainer.step_s == pytest.approx(60.0, rel=0.03)
    assert trainer.binds == "training"
    free = _iterate({**ASYNC, "staleness": 50}, update=0.01)
    again = _iterate({**ASYNC, "staleness": 100}, update=0.01)
    assert free.step_s == pytest.approx(again.step_s, rel=0.02)
    assert free.binds == "generation"


def test_throughput_rises_with_eta_and_then_stays() -> None:
    rates = [_iterate({**ASYNC, "staleness": e}, update=6.0).tokens_per_s for e in (0, 1, 4, 16)]
    assert rates[0] < rates[1] <= rates[2] * 1.02
    assert rates[3] == pytest.approx(rates[2], rel=0.05)


def test_the_order_of_submission_keeps_the_bound_and_completion_order_may_not() -> None:
    """AReaL's admission: consumed in order, a prompt's lag is at most eta (rollouts.md 6.10)."""
    for eta in (0, 1, 3):
        ordered = _given({**ASYNC, "staleness": eta, "order": "submission"}, sigma=1.5)
        assert max(run_async(ordered, 12).lags) <= eta
    loose = run_async(_given({**ASYNC, "staleness": 1}, sigma=2.5, update=0.5), 30)
    assert max(loose.lags) > 1


def test_one_step_off_takes_the_slower_of_both_and_shows_the_wait() -> None:
    turns = _iterate({"kind": "sync_split"})
    beside = _iterate({"kind": "one_step_off"})
    assert beside.step_s == pytest.approx(max(turns.generation_s, 5.0))
    slow = _iterate({"kind": "one_step_off"}, update=100.0)
    assert slow.step_s == pytest.approx(100.0)
    assert slow.time_s["generation"] == 0.0
    assert turns.step_s == pytest.approx(turns.generation_s + 5.0)


def test_over_issue_shortens_a_round_and_its_lag_is_what_is_in_flight() -> None:
    """Little: in flight over consumed versions are spanned, so the mean lag is 2 - 1."""
    whole, partial = (
        _iterate({"kind": "colocated"}),
        _iterate({"kind": "colocated", "in_flight": 2}),
    )
    assert partial.generation_s < whole.generation_s
    run = [_iterate({"kind": "colocated", "in_flight": 2}, prompts=n).staleness for n in (32, 64)]
    assert sum(run) / 2 == pytest.approx(1.0, abs=0.25)


def test_an_interruption_costs_its_prefill_and_draining_a_wait() -> None:
    free = _iterate({**ASYNC, "on_sync": "keep"}, update=0.01, per_token=1e-4)
    cut = _iterate({**ASYNC, "on_sync": "interrupt"}, update=0.01, per_token=1e-4)
    assert free.step_s < cut.step_s
    drained = _iterate({**ASYNC, "on_sync": "drain"}, update=0.01)
    kept = _iterate({**ASYNC, "on_sync": "keep"}, update=0.01)
    assert kept.step_s < drained.step_s


def test_lent_gpus_help_where_generation_binds() -> None:
    layout = {**ASYNC, "staleness": 1}
    alone = _iterate(layout, update=4.0)
    lent = _iterate({**layout, "lend_below": 1.0, "lend_instances": 4}, update=4.0)
    dear = _iterate(
        {**layout, "lend_below": 1.0, "lend_instances": 4, "lend_switch": "30 s"}, update=4.0
    )
    assert lent.step_s < alone.step_s < dear.step_s


def test_phases_sum_to_the_step_and_the_same_seed_gives_the_same() -> None:
    for layout in ({"kind": "colocated"}, {"kind": "one_step_off"}, ASYNC):
        first, second = _iterate(layout), _iterate(layout)
        assert sum(first.time_s.values()) == pytest.approx(first.step_s)
        assert first == second


# (C, B, q, rho, M_tail, measured mean staleness): six published runs.
PUBLISHED = [
    (120, 240, 2, 0.63, 1.42, 1.26),
    (240, 120, 2, 0.92, 1.43, 3.59),
    (128, 128, 2, 1.07, 1.44, 3.09),
    (240, 120, 1, 0.86, 1.42, 3.40),
    (120, 120, 1, 0.67, 1.42, 1.92),
    (128, 128, 1, 1.14, 1.45, 2.01),
]


@pytest.mark.parametrize("case", PUBLISHED)
def test_queue_staleness_is_within_three_tenths_of_six_published_runs(case: Any) -> None:
    *inputs, measured = case
    assert abs(queue_staleness(*inputs) - measured) <= 0.3 + 1e-9


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ({"kind": "async"}, "staleness or max_in_flight"),
        ({**ASYNC, "lend_below": 0.5}, "together"),
    ],
)
def test_layouts_that_cannot_be_are_refused(layout: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _given(layout)
