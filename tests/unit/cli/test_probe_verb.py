"""`flopwright probe` writes its three files or none, and says so before it measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopwright.cli import main

REQUEST = "flopwright.executor.measure.probe_request.run_probe_ranks"


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measured before the place was checked")

    monkeypatch.setattr(REQUEST, measured)
    (tmp_path / "plan.yaml").write_text("a plan")
    (tmp_path / "machine" / "cluster.yaml").mkdir(parents=True)
    for out, words in (
        ("plan.yaml", "is not a folder"),
        ("plan.yaml/deeper", "Not a directory"),
        ("machine", "cluster.yaml: is a folder"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["probe", "--nproc", "1", "--out", str(tmp_path / out)])
        assert end.value.code == 2
        assert words in capsys.readouterr().err
    assert (tmp_path / "plan.yaml").read_text() == "a plan"
    assert [p.name for p in (tmp_path / "machine").iterdir()] == ["cluster.yaml"]
