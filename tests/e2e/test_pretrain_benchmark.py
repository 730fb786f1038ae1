"""benchmarks/pretrain.py: the planted explosion in miniature, and what its verdicts rest on."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pretrain(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("pretrain")


@pytest.mark.slow
def test_qk_clip_stops_a_planted_explosion_and_chance_is_not_learnt(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    done = subprocess.run(
        [sys.executable, "benchmarks/pretrain.py", "--parts", "explosion", "shuffled",
         "--layers", "2", "--explosion-steps", "60", "--pilot-steps", "30", "--batch", "8", "64",
         "--text", "docs", "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    chance = result["shuffled"]
    assert not chance["beats_the_bars"]
    assert chance["held_out"] < chance["unigram"] + 0.5  # it has learnt how often each comes
    found = result["explosion"]
    assert found["stopped"]
    assert found["max_logit_recorded"] > 3 * found["tau"]
    assert found["largest_logit_clipped"] < 2 * found["tau"]
    assert found["clipped_heads"] > 0


def _rows(logits: list[float]) -> list[dict[str, float]]:
    return [{"max_logit": x, "clipped_heads": float(x > 100), "loss": 5.0} for x in logits]


@pytest.mark.parametrize(
    ("recorded", "clipped", "stopped"),
    [
        ([20.0, 90.0, 400.0, 900.0], [20.0, 90.0, 120.0, 110.0], True),
        ([20.0, 90.0, 95.0, 90.0], [20.0, 90.0, 95.0, 90.0], False),  # nothing exploded
        ([20.0, 90.0, 400.0, 900.0], [20.0, 90.0, 400.0, 110.0], False),  # too late
        ([20.0, 90.0, 400.0, 900.0], [20.0, 90.0, 120.0, 160.0], False),  # it still grows
        ([20.0, 400.0, 90.0, 80.0], [20.0, 110.0, 90.0, 80.0], False),  # it went by itself
    ],
)
def test_an_explosion_counts_as_stopped_only_if_it_goes_on_without_the_clip(
    pretrain: Any, recorded: list[float], clipped: list[float], stopped: bool
) -> None:
    found = pretrain.judged({"recorded": _rows(recorded), "clipped": _rows(clipped)})
    assert found["stopped"] is stopped


@pytest.mark.parametrize(
    ("adamw", "muonclip", "good"),
    [(3.5, 3.4, True), (3.5, 3.5, True), (3.4, 3.5, False), (4.6, 4.4, False)],
)
def test_both_end_well_below_the_bigram_entropy_and_muonclip_no_higher(
    pretrain: Any, adamw: float, muonclip: float, good: bool
) -> None:
    main = {"bigram": 5.0, "held_out": {"adamw": adamw, "muonclip": muonclip}}
    assert pretrain.verdict({"main": main}) is good


def test_the_best_rate_is_that_of_the_lowest_loss_and_curves_keep_their_last_step(
    pretrain: Any,
) -> None:
    assert pretrain.best({1e-3: 4.0, 3e-3: 3.9, 6e-3: 3.95}) == 3e-3
    assert pretrain.best({1e-3: 4.0, 6e-3: 3.9, 3e-3: 3.905}) == 3e-3  # a tie
    assert pretrain.binned([1.0, 3.0, 5.0, 7.0, 9.0], points=2) == [(3, 3.0), (5, 8.0)]
    assert pretrain.tail([1.0, 2.0, 3.0, 5.0]) == 5.0
