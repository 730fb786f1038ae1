"""The published runs that ship with the repository: each loads, is sound, and says where from."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from flopwright.errors import InputError
from flopwright.plan.parallel import plan_violations
from flopwright.simulator.accuracy.published_files import (
    FOLDER,
    PublishedFile,
    file_name,
    load_published,
    published_file,
    url_of,
)
from flopwright.simulator.accuracy.run_of_row import PublishedRun, published_runs
from flopwright.spec.load import dump_yaml
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import parse_yaml, read_yaml

PATHS = sorted(FOLDER.glob("*.yaml"))


def load(path: Path) -> PublishedRun:
    return validate(PublishedFile, read_yaml(path)).run()


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_a_file_is_a_sound_run_with_its_address(path: Path) -> None:
    run = load(path)
    assert file_name(run) == path.name
    assert run.in_overall
    assert run.measured_step_s is not None
    assert 0 < run.measured_step_s < 1e4
    assert run.where.startswith("https://")
    assert not plan_violations(run.plan, run.scenario)
    assert run.plan.world_size == run.num_gpus <= run.scenario.cluster.num_gpus
    assert run.scenario.cluster.node.gpu.name == run.gpu


@pytest.mark.slow
def test_the_files_are_a_spread() -> None:
    found = load_published()
    assert found.skipped == ()
    runs = found.runs
    assert 60 <= len(runs) <= 120
    assert max(Counter(r.cell for r in runs).values()) <= 3
    assert len({r.source for r in runs}) >= 15
    assert {r.stack.family for r in runs} == {"dense", "moe"}
    gpus = {"a100_sxm_40gb", "a100_sxm_80gb", "a800_sxm_80gb", "h100_sxm", "h200_sxm", "b200",
            "gb200", "gb300", "mi300x"}  # fmt: skip
    assert {r.gpu for r in runs} >= gpus
    assert any("lora" in r.flags for r in runs)
    assert len({r.id for r in runs}) == len(runs)


def test_a_file_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    text = PATHS[0].read_text().replace("metric:", "metrik:")
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(InputError, match="metrik"):
        load_published(tmp_path)


def test_a_file_reads_back_as_what_was_written() -> None:
    for path in PATHS[:: max(1, len(PATHS) // 8)]:
        run = load(path)
        again = validate(PublishedFile, parse_yaml(dump_yaml(published_file(run)), "a")).run()
        assert again == run


@pytest.mark.parametrize(
    ("source", "url"),
    [
        ("NVIDIA/NeMo:docs/a.md", "https://github.com/NVIDIA/NeMo/blob/HEAD/docs/a.md"),
        ("a/b@v24.11.1:c/R.md", "https://github.com/a/b/blob/v24.11.1/c/R.md"),
        ("a/b:docs/x.md@7fec52c213", "https://github.com/a/b/blob/7fec52c213/docs/x.md"),
        ("a/b:X/results/y", "https://github.com/a/b/tree/HEAD/X/results/y"),
        ("arXiv:2402.15627 Table 2", "https://arxiv.org/abs/2402.15627"),
        ("NVIDIA/Megatron-LM issue 756", "https://github.com/NVIDIA/Megatron-LM/issues/756"),
        ("gist me/0123abcd", "https://gist.github.com/me/0123abcd"),
        ("https://example.org/x (table)", "https://example.org/x"),
        (
            "github.com/a/b data/c.csv",
            "https://github.com/a/b/blob/HEAD/data/c.csv",
        ),
        ("docs.nvidia.com/nemo (25.02)", "https://docs.nvidia.com/nemo"),
    ],
)
def test_a_source_is_an_address(source: str, url: str) -> None:
    assert url_of(source) == url


def script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "published_scenarios.py"
    spec = importlib.util.spec_from_file_location("published_scenarios", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_files_are_what_the_script_writes_of_the_rows(measured_data: Path) -> None:
    rows = published_runs(measured_data / "validation" / "training_runs.csv").runs
    by_id = {run.id: run for run in script().chosen(rows)}
    assert {load(p).id for p in PATHS} == set(by_id)
    for path in PATHS:
        run = load(path)
        other = by_id[run.id]
        assert (run.scenario, run.plan, run.stack) == (other.scenario, other.plan, other.stack)
        assert run.measured_step_s == pytest.approx(other.measured_step_s, rel=1e-9)
        assert run.row_ids == other.row_ids
