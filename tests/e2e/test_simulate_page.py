"""docs/simulate.md does what it says: its own commands are run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from flopwright.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "simulate.md"


@pytest.mark.slow
def test_the_commands_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert len(commands) == 6
    for program, *arguments in commands:
        assert program == "flopwright"
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert not stop.value.code, f"{arguments}: {capsys.readouterr().err}"
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"plan.yaml", "t.json", "t.png", "ranks"}


def test_the_page_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    page = PAGE.read_text()
    assert options > {"--plan", "--engine", "--trace"}
    assert [o for o in sorted(options - {"--help"}) if o not in page] == []
