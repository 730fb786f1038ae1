"""Instances with batches of their own: closed forms, conservation, and what repacking does."""

from __future__ import annotations

import math

import pytest

from flopwright.simulator.rollouts.layouts import iteration
from flopwright.simulator.rollouts.layouts_replicas import (
    ReplicaRun,
    _Replicas,
    run_replicas,
)
from flopwright.spec.rollouts.engine import EngineModel, PrefillTable, StepTable
from flopwright.spec.rollouts.layout import LayoutInput, ReplicaBatches

A, C, KAPPA = 0.01, 1e-4, 2e-8


def _given(
    repack_s: float | None = None,
    *,
    sigma: float = 1.0,
    capacity: int = 60_000,
    instances: int = 4,
) -> LayoutInput:
    engine = EngineModel(
        decode=StepTable.linear(A, C, KAPPA),
        prefill=PrefillTable(per_token=1e-5),
        kv_capacity_tokens=capacity,
        max_running=256,
    )
    layout = {"kind": "replica_batches", "prompts": 4, "repack_every": f"{repack_s} s"}
    if repack_s is None:
        del layout["repack_every"]
    return LayoutInput.model_validate(
        {
            "batch": {
                "prompts": 16,
                "samples": 4,
                "prompt_tokens": 100,
                "lengths": {"mean": 1000, "sigma": sigma, "cap": 8000},
            },
            "fleet": {"engine": engine.to_data(), "instances": instances},
            "times": {"update": "1 s", "sync": "2 s"},
            "layout": layout,
        }
    )


def _run(given: LayoutInput) -> ReplicaRun:
    assert isinstance(given.layout, ReplicaBatches)
    return run_replicas(given, given.layout)


def test_equal_lengths_take_what_a_batch_takes() -> None:
    """b attempts of L tokens over p of prompt: L (a + c b + kappa b p) + kappa b L (L - 1) / 2."""
    given = _given(sigma=0.0)
    report = iteration(given)
    b, p, length = 16, 100, 1000
    batch_s = length * (A + C * b + KAPPA * b * p) + KAPPA * b * length * (length - 1) / 2
    batch_s += 2.0 + b * p * 1e-5  # the weights, and the prompts
    # 4 instances finish 4 groups each in that time: a step of 16 prompts
    assert report.generation_s == pytest.approx(batch_s, rel=1e-3)
    assert report.response_tokens == 16 * 4 * length
    # a cache that grows evenly is half full of what it ends with
    mean = b * (p + length / 2)
    assert report.mean_tokens == pytest.approx(mean, rel=0.02)
    assert report.time_s["generation"] == pytest.approx(report.generation_s - 1.0)


def test_instances_whose_responses_end_together_are_never_packed() -> None:
    assert _run(_given(1.0, sigma=0.0)).moves == 0


def test_repacking_fills_caches_and_generates_more() -> None:
    alone, packed = _run(_given()), _run(_given(1.0))
    assert alone.moves == 0
    assert packed.moves > 10
    assert packed.context_s / packed.busy_s > 1.1 * alone.context_s / alone.busy_s
    assert packed.tokens / packed.seconds > 1.1 * alone.tokens / alone.seconds


def test_what_is_moved_is_decoded_once() -> None:
    """Tokens decoded are those that responses have: complete, waiting, or running."""
    given = _given(1.0)
    assert isinstance(given.layout, ReplicaBatches)
    state = _Replicas(given, given.layout)
    while len(state.complete) < 200:
        state.repack(state.event())
    decoded = sum(s.decoded for s in state.servers.servers)
    work = state.work
    running = {r for s in state.servers.servers for r in s.running}
    now = sum(
        work.target[r] - (end - s.step)
        for s in state.servers.servers
        for r, end in s.running.items()
    )
    kept = sum(work.tokens[r] for r in range(len(work.length)) if r not in running)
    assert decoded == pytest.approx(kept + now, rel=0.01)
    assert state.moves > 5


def test_nothing_is_packed_beyond_cache_and_batch_limits() -> None:
    run = _run(_given(1.0, capacity=9000))
    assert run.peak_tokens <= 9000
    assert math.isfinite(run.tokens / run.seconds)


def test_groups_are_no_older_than_their_batch() -> None:
    """While a batch runs, the others complete few steps' worth of groups."""
    run = _run(_given(1.0))
    assert min(run.lags) >= 0
    assert max(run.lags) <= 10


def test_one_instance_has_nobody_to_pack_with() -> None:
    given = _given(0.5, instances=1)
    assert _run(given).moves == 0
