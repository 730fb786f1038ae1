"""Fitted serving curves: their header says what they are, and they cannot rebuild a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopwright.simulator.rollouts.engine.curves import (
    FOLDER,
    kernel_calibration,
    serving_curves,
    serving_name,
)
from flopwright.spec.load import load_gpu

FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_fitted_file_names_source_commit_licence_and_change(path: Path) -> None:
    head = path.read_text().split("id:")[0]
    for word in ("Source:", "commit", "Apache-2.0", "changed: fitted"):
        assert word in head
    assert serving_curves(load_gpu(path.stem)).num_values <= 200


def test_a_gpu_without_tables_takes_its_relatives_shares_on_its_own_peaks() -> None:
    h20 = load_gpu("h20")
    assert serving_name(h20) == "h100_sxm"
    own = {c.dtype: c for c in kernel_calibration(h20).curves if c.kind == "grouped_gemm"}
    theirs = {
        c.dtype: c
        for c in kernel_calibration(load_gpu("h100_sxm")).curves
        if c.kind == "grouped_gemm"
    }
    assert own["bf16"].half_m < theirs["bf16"].half_m
    assert own["bf16"].max_efficiency == theirs["bf16"].max_efficiency
