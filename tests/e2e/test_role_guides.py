"""The guides do what they say: their commands are run, one after the other, in a new folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from flopwright.cli import main

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
FILES = {
    "planner.md": {"plan.yaml"},
    "engineer.md": {"plan.yaml", "step.json.gz", "bundle-mini", "run-engineer"},
    "team.md": {"plan.yaml", "run-team", "compare.html"},
}


@pytest.mark.slow
@pytest.mark.parametrize("guide", sorted(FILES))
def test_the_commands_of_the_guide_run(
    guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLOPWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FLOPWRIGHT_STORE", raising=False)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    blocks = re.findall(r"^```sh\n(.*?)^```", (GUIDES / guide).read_text(), re.M | re.S)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert commands
    for program, *arguments in commands:
        assert program == "flopwright"
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert not stop.value.code, f"{arguments}: {capsys.readouterr().err}"
    assert {p.name for p in work.iterdir()} == FILES[guide]


def test_every_page_of_the_app_stands_in_a_guide() -> None:
    text = "".join(path.read_text() for path in GUIDES.glob("*.md"))
    for page in ("Explore", "Plan", "Rollouts", "Compare", "Export"):
        assert f"**{page}**" in text


@pytest.mark.parametrize("guide", sorted(FILES))
def test_the_readme_leads_to_the_guide(guide: str) -> None:
    assert f"(docs/guides/{guide})" in (GUIDES.parents[1] / "README.md").read_text()
    links = re.findall(r"\]\((\.\./[a-z_]+\.md)\)", (GUIDES / guide).read_text())
    assert links
    assert [link for link in links if not (GUIDES / link).is_file()] == []
