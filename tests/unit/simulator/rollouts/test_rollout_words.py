"""The report's words: one is not many, and what is assumed is called so once."""

from __future__ import annotations

import pytest

from flopwright.cli import main


def _out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit):
        main(["rollouts", *arguments])
    return capsys.readouterr().out


def test_assumed_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    out = _out(capsys, "kimi_k2_like_256gpu_h800", "--rounds", "1")
    listed = out.split("\nassumed:\n")[1].splitlines()
    assert "  prompts: N is not published" in listed
    assert "  prompt_tokens" in listed
    assert not [line for line in listed if "assumed" in line]


def test_one_round_is_not_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert "mean of 1 steady round after" in _out(
        capsys, "small_exponential_1gpu", "--rounds", "1"
    )
    assert "mean of 2 steady rounds after" in _out(
        capsys, "small_exponential_1gpu", "--rounds", "2"
    )
