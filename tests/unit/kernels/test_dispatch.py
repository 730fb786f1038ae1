"""Which kernel an op runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flopwright.errors import InputError
from flopwright.kernels import dispatch


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    dispatch.measured.cache_clear()


def test_a_cpu_and_float64_run_the_reference() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert dispatch.kernel_for("attention", torch.ones(1, dtype=dtype)) == "reference"


def test_the_prior_says_that_it_is_one() -> None:
    for op in ("attention", "grouped_gemm", "rms_norm"):
        assert dispatch.choose(op, "NVIDIA H200").reason.startswith("not measured on a GPU")
    assert dispatch.choose("grouped_gemm", "NVIDIA H200").kernel == "library"


def test_a_measured_choice_holds_for_its_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "choices.json"
    entry = {"kernel": "library", "reason": "1.2 times as fast"}
    file.write_text(json.dumps({"attention": {"Card A": entry}}), encoding="utf-8")
    monkeypatch.setattr(dispatch, "CHOICES", file)
    assert dispatch.choose("attention", "Card A") == dispatch.Choice(**entry)
    assert dispatch.choose("attention", "Card B") == dispatch.PRIOR["attention"]


def test_the_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "attention=library, reference")
    assert dispatch.choose("attention", "any").kernel == "library"
    assert dispatch.choose("rope", "any").kernel == "reference"
    monkeypatch.setenv(dispatch.VARIABLE, "attention=fast")
    with pytest.raises(InputError, match="fast"):
        dispatch.choose("attention", "any")
