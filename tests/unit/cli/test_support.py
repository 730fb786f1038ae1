"""`flopwright support` as users call it."""

import json

import pytest

from flopwright.cli import main


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["support", *arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.slow
def test_the_verdict_comes_first_with_counts(capsys) -> None:
    code, out, _ = _run(capsys, "--gpu", "h100", "--framework", "megatron")
    assert code == 0
    assert out.startswith("tested: ")
    for text in ("published run", "Priced by: prior-h100_sxm", "megatron-fused", "Exports"):
        assert text in out


def test_json_lists_what_there_is(capsys) -> None:
    code, out, _ = _run(capsys, "--json")
    assert code == 0
    data = json.loads(out)
    assert {"models", "gpus", "frameworks", "stacks", "targets", "executor"} <= set(data)


def test_unknown_names_end_with_2(capsys) -> None:
    code, _, err = _run(capsys, "--gpu", "h900")
    assert code == 2
    assert "did you mean" in err
