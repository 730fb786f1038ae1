"""docs/calibration.md does what it says: its own commands are run, shorter."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from flopwright.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "calibration.md"


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


@pytest.mark.slow
def test_the_commands_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOPWRIGHT_HOME", str(tmp_path / "home"))
    found = commands()
    assert len(found) == 6
    for program, *arguments in found:
        assert program == "flopwright"
        for option, short in (("--minutes", "0.1"), ("--steps", "6")):
            if option in arguments:
                arguments[arguments.index(option) + 1] = short
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert not stop.value.code, f"{arguments}: {capsys.readouterr().err}"
    assert {p.name for p in (tmp_path / "machine").iterdir()} == {
        "probe.json", "cluster.yaml", "calibration.yaml",
    }  # fmt: skip
    assert (tmp_path / "cluster" / "request.json").is_file()
    assert (tmp_path / "learnt.yaml").is_file()


@pytest.mark.parametrize("verb", ["probe", "calibrate"])
def test_the_page_names_every_option(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    page = PAGE.read_text()
    assert len(options) > 5
    assert [o for o in sorted(options - {"--help"}) if o not in page] == []
