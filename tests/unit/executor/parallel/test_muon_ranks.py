"""Muon over 1, 2 and 4 real ranks, however its matrices are cut, against torch.optim.Muon."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from launched_ranks import run_ranks

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("muon_rank_checks.py")
NUMBERS = {"matrices": 6 * 16 + 20 * 4 + 5 * 7 + 4 * 12 * 5 + 4 * 5 * 6, "rest": 6 + 9 * 6}
EXPERT_NUMBERS = 4 * 12 * 5 + 4 * 5 * 6
CUT_BY_TP = 6 * 16 + 20 * 4 + EXPERT_NUMBERS


@pytest.fixture(scope="module", params=[1, 2, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: Any) -> list[dict[str, Any]]:
    return run_ranks(PROGRAM, request.param, tmp_path_factory.mktemp("muon"))


def updates(rank: dict[str, Any]) -> dict[str, Any]:
    return {n: c for n, c in rank.items() if not n.startswith("muonclip")}


def test_muonclip_training_equals_one_process_with_torchs_optimizers(
    results: list[dict[str, Any]],
) -> None:
    for rank in results:
        for name, check in rank.items():
            if name.startswith("muonclip"):
                bound = 2e-5 if "fp32" in name else 1e-11
                assert check["difference"] < bound, (name, check)
                assert sum(check["clipped"]) > 0, name
                rounding = 1024 if "fp32" in name else 0  # DeepSpeed's padding
                assert abs(check["optimizer_bytes"] - check["predicted_bytes"]) <= rounding, name


def test_weights_equal_torchs_muon(results: list[dict[str, Any]]) -> None:
    for rank in results:
        for name, check in updates(rank).items():
            # Rounding alone; bf16 weights are one from their masters.
            bound = {"fp64": 1e-14, "fp32": 1e-6, "bf16": 2**-8}[name.split()[1]]
            assert check["difference"] < bound, (name, check)


def test_one_momentum_for_matrices_two_moments_for_the_rest(
    results: list[dict[str, Any]],
) -> None:
    world = len(results)
    for name in updates(results[0]):
        width = 8 if "fp64" in name else 4
        master = 4 if "bf16" in name else 0
        held = dict.fromkeys(("matrices", "experts", "rest"), 1.0)
        if "ep2" in name:
            held["experts"] /= 2
        expected = sum(r[name]["optimizer_bytes"] for r in results) / world
        tp = next((int(w[2:]) for w in name.split() if w.startswith("tp")), 1)
        if tp > 1:
            continue  # not every matrix of these is cut
        cut = world // (2 if "hsdp" in name else 1)
        shards = {"none": 1, "zero1": cut, "zero2": cut, "dtensor": cut}[name.split()[0]]
        dense = NUMBERS["matrices"] - EXPERT_NUMBERS
        numbers = (dense + 2 * NUMBERS["rest"]) / shards
        ep = 2 if "ep2" in name else 1
        numbers += EXPERT_NUMBERS / ep / max(1, shards // ep if shards > 1 else 1)
        masters = (dense + NUMBERS["rest"]) / shards + EXPERT_NUMBERS / ep / max(1, shards // ep)
        exact = numbers * width + masters * master
        padding = 4 * 2 * 2 * 2 * world * width if "zero" in name else 0
        assert exact <= expected + 1e-9, name
        assert expected <= math.ceil(exact) + padding, name
