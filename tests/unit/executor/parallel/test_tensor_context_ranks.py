"""Tensor, sequence and context parallelism and cut experts over 2 and 4 real ranks.

Each plan against the whole model in one process: tensor_context_checks.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launched_ranks import run_ranks

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("tensor_context_checks.py")
# Relative error of loss, of each gradient and of their norm, by what a check's name ends with.
# bf16 keeps 8 bits, and partial sums are rounded to it before they are added.
BOUNDS = {"bf16": (1e-3, 5e-2, 5e-3), "fp32": (1e-6, 1e-5, 1e-6), "": (1e-12, 1e-9, 1e-12)}


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: Any) -> list[tuple[str, Any]]:
    ranks = run_ranks(PROGRAM, request.param, tmp_path_factory.mktemp("ranks"))
    return [(name, check) for rank in ranks for name, check in rank.items()]


def test_losses_and_gradients_equal_the_whole_model(results: list[tuple[str, Any]]) -> None:
    for name, check in results:
        bounds = next(b for end, b in BOUNDS.items() if name.endswith(end))
        found = (check["loss"], check["gradient"], check["norm"])
        assert all(f < b for f, b in zip(found, bounds, strict=True)), (name, found)


def test_first_weights_are_slices_of_the_whole_ones(results: list[tuple[str, Any]]) -> None:
    assert all(check["weights"] for _, check in results)


def test_loads_of_experts_add_up_to_all_tokens(results: list[tuple[str, Any]]) -> None:
    assert all(check["loads"] for _, check in results)


def test_what_travels_is_what_the_cost_tables_state(results: list[tuple[str, Any]]) -> None:
    for name, check in results:
        if "ep2 etp2" in name:
            continue  # real choices are uneven; the tables have the balanced load
        assert sorted(check["sent"]) == sorted(check["priced"]), name


def test_checkpoints_are_whole_again(results: list[tuple[str, Any]]) -> None:
    assert all(check["joined"] for _, check in results)


def test_what_context_parallel_ranks_keep_is_what_the_cost_tables_state(
    results: list[tuple[str, Any]],
) -> None:
    """Not compared: real loads of experts on other ranks, and the index of learned positions."""
    compared = [
        (name, check)
        for name, check in results
        if " cp" in name and not {"ep2", "tp2", "pp2", "gpt"} & set(name.split())
    ]
    for name, check in compared:
        assert check["kept"] == check["kept_priced"], name
    assert compared
