"""The planner's pages do what they say: their own commands are run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from flopwright.cli import main
from flopwright.spec.load import load_scenario

DOCS = Path(__file__).parents[2] / "docs"
# Page -> files its commands leave, and whether it takes long.
PAGES = {
    "plan.md": {"plan.yaml", "run.yaml", "anneal.yaml"},
    "explain.md": {"plan.yaml"},
    "recommend.md": {"largest.yaml"},
    "sweep.md": {"sweep.yaml", "sweep.parquet", "again.parquet"},
    "exports.md": {"plan.yaml", "bundle", "more", "train.sh", "imported.yaml"},
}
# Pages that name every option of a verb.
VERBS = {"recommend": "recommend.md", "sweep": "sweep.md", "explain": "explain.md"}


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_commands_of_the_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if page == "sweep.md":
        pytest.importorskip("pyarrow")
        data = load_scenario("kimi_k2_mini_2cpu_fp32").to_data()
        (block,) = _blocks(page, "yaml")
        (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(data | yaml.safe_load(block)))
    if page == "exports.md":
        (job,) = _blocks(page, "bash")
        (tmp_path / "train.sh").write_text(job)
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line) for b in _blocks(page, "sh") for line in b.splitlines()]
    assert commands
    for program, *arguments in commands:
        assert program == "flopwright"
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert not stop.value.code, f"{arguments}: {capsys.readouterr().err}"
    assert {p.name for p in tmp_path.iterdir()} == PAGES[page]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_readme_leads_to_the_page(page: str) -> None:
    assert f"(docs/{page})" in (DOCS.parent / "README.md").read_text()


def test_every_question_is_on_the_page() -> None:
    from flopwright.planner.questions.registry import QUESTIONS

    page = (DOCS / "explain.md").read_text()
    assert [name for name in QUESTIONS if f"`{name}`" not in page] == []


def test_every_target_and_file_is_on_the_page() -> None:
    from flopwright.planner.export.readme import FILES
    from flopwright.planner.export.registry import TARGETS

    page = (DOCS / "exports.md").read_text()
    assert [name for name in (*TARGETS, *FILES) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_the_page_names_every_option(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    page = (DOCS / VERBS[verb]).read_text()
    shared = {"--help", "--calibration", "--stack"}
    assert options > {"--json"}
    assert [o for o in sorted(options - shared) if o not in page] == []
