"""The report's shape and its arithmetic on runs made up here."""

from __future__ import annotations

import json

import pytest

from flopwright.simulator.accuracy.figure import accuracy_png
from flopwright.simulator.accuracy.report import AccuracyReport, Baseline, Skipped
from flopwright.simulator.accuracy.score import Scored

SCORE_KEYS = {
    "n", "coverage", "median_abs_error", "p90_abs_error", "bias", "spearman", "spearman_one_batch",
    "interval80_coverage",
}  # fmt: skip


def run(
    name: str, error: float, gpu: str = "h100_sxm", family: str = "dense", apart: str = ""
) -> Scored:
    return Scored(
        id=name,
        measured=1.0,
        predicted=1 + error,
        low=0.9 * (1 + error),
        high=1.1 * (1 + error),
        labels={
            "source": "a/b", "gpu": gpu, "model": "m", "family": family, "stack": "s",
            "framework": "f", "precision": "bf16", "recompute": "none", "cell": gpu,
            "apart": apart, "also": "",
        },
        cell=gpu,
    )  # fmt: skip


def memory(error: float, definition: str) -> Scored:
    return Scored(
        id=f"m{error}", measured=100.0, predicted=100 * (1 + error), low=90, high=110,
        labels={"definition": definition},
    )  # fmt: skip


def report(by: tuple[str, ...] = ("gpu",)) -> AccuracyReport:
    runs = (
        run("r1", 0.1),
        run("r2", -0.2),
        run("r3", 0.3, "b200", "moe"),
        run("r4", 0.9, apart="vtrain-single"),
        run("r5", 0.5, apart="odd own-plan"),
    )
    return AccuracyReport(
        file="runs.csv",
        protocol="committed stacks",
        runs=runs,
        memory=(memory(0.02, "allocated"), memory(-0.1, "allocated"), memory(0.2, "smi")),
        skipped=(
            Skipped(
                id="x-step_time", reason="no layers", in_scope=True, configuration="x",
                labels={"gpu": "b200"},
            ),
            Skipped(
                id="x-mfu", reason="no layers", in_scope=True, configuration="x",
                labels={"gpu": "b200"},
            ),
            Skipped(id="t", reason="out of scope: TPU", in_scope=False, configuration="t"),
        ),
        by=by,
        free_parameters=7,
        parameters_by_level={"stack": 7},
        baselines={
            "constant_mfu": Baseline(
                about="b", runs=(run("r1", 0.4), run("r4", 9.0)), free_parameters=2
            )
        },
    )  # fmt: skip


def test_the_json_has_every_key_that_readers_rely_on() -> None:
    data = json.loads(json.dumps(report().to_data()))
    assert {"overall", "groups", "memory", "skipped", "free_parameters", "baselines"} <= set(data)
    assert SCORE_KEYS | {"macro"} == set(data["overall"])
    assert {"cells", "median_abs_error", "p90_abs_error"} == set(data["overall"]["macro"])
    for group in data["groups"].values():
        assert set(group) == SCORE_KEYS
    assert SCORE_KEYS | {"under_by_5_percent_share", "groups"} == set(data["memory"])
    assert data["skipped"][0] == {"id": "x-step_time", "reason": "no layers"}
    assert data["free_parameters"] == 7
    assert data["baselines"]["constant_mfu"]["free_parameters"] == 2


def test_what_is_set_apart_is_not_in_the_headline_but_has_a_group() -> None:
    data = report().to_data()
    assert data["overall"]["n"] == 3
    assert data["overall"]["median_abs_error"] == pytest.approx(0.2)
    assert data["groups"]["vtrain-single"]["n"] == 1
    assert data["groups"]["odd"]["median_abs_error"] == pytest.approx(0.5)
    assert data["groups"]["own-plan"]["n"] == 1
    assert data["groups"]["dense"]["n"] == 2
    assert data["groups"]["moe"]["median_abs_error"] == pytest.approx(0.3)


def test_a_configuration_without_prediction_lowers_the_coverage_once() -> None:
    data = report().to_data()
    assert data["overall"]["coverage"] == pytest.approx(3 / 4)  # x has two rows
    assert data["groups"]["b200"]["coverage"] == pytest.approx(1 / 2)
    assert data["groups"]["h100_sxm"]["coverage"] == 1.0


def test_cells_and_combinations() -> None:
    data = report(("gpu", "family")).to_data()
    assert data["overall"]["macro"] == {
        "cells": 2,
        "median_abs_error": pytest.approx(0.225),
        "p90_abs_error": pytest.approx(0.15 + 0.9 * 0.15),
    }
    assert data["groups"]["h100_sxm | dense"]["n"] == 2


def test_a_baseline_is_scored_on_the_headline_only() -> None:
    found = report().to_data()["baselines"]["constant_mfu"]
    assert found["n"] == 1
    assert found["median_abs_error"] == pytest.approx(0.4)


def test_memory_is_scored_by_definition_and_under_estimates_are_counted() -> None:
    found = report().to_data()["memory"]
    assert found["n"] == 3
    assert found["under_by_5_percent_share"] == pytest.approx(1 / 3)
    assert found["groups"]["allocated"]["under_by_5_percent_share"] == pytest.approx(1 / 2)
    assert found["groups"]["smi"]["bias"] == pytest.approx(0.2)


def test_the_picture_is_a_png() -> None:
    pytest.importorskip("matplotlib")
    assert accuracy_png(report()).startswith(b"\x89PNG")
