"""Where a loop's phases are counted."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from flopwright.simulator.accuracy.rl.outcome import LoopOutcome
from flopwright.spec.load import load_model
from flopwright.spec.rollouts.experiment import LoopExperiment

NUMBERS = {"decode": {"batch": [1, 2], "base": [0.01, 0.01], "per_context_token": [0, 0],
                      "interpolate": True}}  # fmt: skip


def _loop(**changes: Any) -> LoopExperiment:
    sync = {"path": "broadcast", "weights": "10 GB", "tensors": 1000, "bucket": "1 GB",
            "senders": 8, "receivers": 8, "engine_ranks": 1, "rate": "5 GB/s"}  # fmt: skip
    given = {
        "model": load_model("qwen25_7b").to_data(), "cluster": {"node_type": "hgx_h20", "gpus": 8},
        "batch": {"prompts": 4, "samples": 2, "lengths": {"mean": 100, "sigma": 0.5, "cap": 300}},
        "rollout": {"gpus": 8, "engine": {"numbers": NUMBERS}}, "sync": sync,
    }  # fmt: skip
    return LoopExperiment.model_validate(given | changes)


def test_a_synchronisation_that_is_timed_in_generation_moves_there_and_is_counted_once() -> None:
    apart, inside = LoopOutcome(_loop()), LoopOutcome(_loop(sync_in="generation"))
    sync_s = apart.metric("sync_time")
    assert sync_s > 2.0  # 10 GB at 5 GB/s
    assert inside.metric("sync_time") == sync_s
    assert inside.metric("generation_time") == pytest.approx(
        apart.metric("generation_time") + sync_s
    )
    assert inside.metric("step_time") == pytest.approx(apart.metric("step_time"))
    assert inside.metric("engine_time") == apart.metric("engine_time")


def test_engines_that_stand_apart_do_not_wake_up_with_the_weights() -> None:
    with pytest.raises(ValidationError, match="belongs to the layout colocated"):
        _loop(sync_in="generation", layout={"kind": "one_step_off"})
