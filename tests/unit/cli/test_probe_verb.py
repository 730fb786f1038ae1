"""`flopwright probe` writes its three files or none, and says so before it measures."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(
    ("field", "old", "new"),
    [
        ("fingerprint.world_size", '"world_size": 2', '"world_size": 0'),
        ("operators.0.m", '"m": 64', '"m": 0'),
        ("operators.0.seconds", '"seconds": 0.001', '"seconds": 1e300'),
        ("operators.0.seconds", '"seconds": 0.001', '"seconds": .inf'),
    ],
)
def test_a_report_that_no_machine_gives_is_refused_by_its_field(
    field: str, old: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"seconds": 0.001, "seconds_min": 0.0009, "seconds_p90": 0.002}
    point = {"kind": "gemm", "name": "mm", "dtype": "fp32", "m": 64, "flops": 1e6, **times}
    machine = {"machine": "m", "processor": "p", "python": "3.11", "tool_version": "1"}
    counts = {"num_cores": 2, "world_size": 2, "threads_per_rank": 1, "memory_bytes": 2**33}
    report = {"created": "now", "fingerprint": machine | counts, "host_floor_s": 1e-6}
    text = json.dumps(report | {"operators": [point]}, indent=1)
    assert old in text
    (tmp_path / "probe.json").write_text(text.replace(old, new, 1))
    with pytest.raises(SystemExit) as end:
        main(["probe", "--read", "--out", str(tmp_path)])
    assert end.value.code == 2
    assert field in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["probe.json"]
