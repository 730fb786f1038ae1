"""Habits a newcomer relies on: links, docs that exist, no machine's paths, data with sources."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

import flopwright

REPOSITORY = Path(flopwright.__file__).resolve().parent.parent
ROOMS = ("kernels", "models", "simulator", "planner", "executor", "dashboards", "scenarios")


def tracked_files() -> list[Path]:
    result = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if result.returncode:
        pytest.skip("not a git checkout: the list of tracked files is unknown")
    return [REPOSITORY / line for line in result.stdout.splitlines()]


def test_the_files_that_are_begun_first_are_there() -> None:
    text = (REPOSITORY / "tests" / "conftest.py").read_text()
    names = re.findall(r'^    "(test_\w+\.py)",$', text, re.M)
    assert len(names) > 10
    assert set(names) <= {path.name for path in tracked_files()}


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_is_linked_into_the_package(room: str) -> None:
    link = REPOSITORY / "flopwright" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room


def test_links_in_markdown_lead_somewhere() -> None:
    broken = []
    for page in [p for p in tracked_files() if p.suffix == ".md"]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(REPOSITORY)} -> {target}")
    assert not broken


def test_no_path_of_one_machine_is_tracked() -> None:
    pattern = re.compile(
        r"(?<![\w./])/(?:work|home/\w+|root|opt)/[\w./-]+|index-url|find-links [^\"$]"
    )
    allowed = {"tests/contract/test_repository_habits.py"}
    bad = []
    for path in tracked_files():
        name = str(path.relative_to(REPOSITORY))
        if (
            path.is_symlink()
            or name in allowed
            or path.suffix in {".png", ".gz"}
            or not path.is_file()
        ):
            continue
        bad += [f"{name}: {m.group(0)}" for m in pattern.finditer(path.read_text(errors="ignore"))]
    assert not bad


def test_data_files_name_their_source() -> None:
    nameless = []
    for path in tracked_files():
        name = path.relative_to(REPOSITORY)
        if path.suffix != ".yaml" or name.parts[0] not in {"models", "simulator"}:
            continue
        text = path.read_text()
        data = yaml.safe_load(text)
        field = isinstance(data, dict) and (data.get("source") or data.get("sources"))
        # A table of many records names its source once, in its header.
        if not field and not re.match(r"(#.*\n)*# Source: \S", text):
            nameless.append(str(name))
    assert not nameless
