"""A bundle read back: sound files pass, a changed byte is found; the zip is the same each time."""

from __future__ import annotations

import io
import zipfile

import pytest

from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.export.bundle import bundle
from flopwright.planner.export.inspect import inspect_files, zipped
from flopwright.planner.export.registry import TARGETS
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import load_scenario, make_plan_file

Made = tuple[PlanFile, dict[str, bytes]]


@pytest.fixture(scope="module")
def made() -> Made:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    file = make_plan_file(scenario, ParallelPlan(dp_shard=2, zero_stage=1), "dp2")
    prediction, trace = predict(scenario, file.parallel, name="dp2")
    extra = [TARGETS[name](file, None) for name in ("accelerate", "skypilot")]
    return file, bundle(file, prediction, trace, extra=extra)


def test_every_file_is_checked(made: Made) -> None:
    checks = inspect_files(made[1], made[0])
    assert [c.name for c in checks] == sorted(made[1])
    assert [c.name for c in checks if c.failed or not c.passed] == []


@pytest.mark.parametrize("name", ["deepspeed.json", "plan.yaml", "torchrun.sh", "ENV.sh"])
def test_a_changed_file_is_found(made: Made, name: str) -> None:
    broken = made[1] | {name: made[1][name] + b"\n"}
    assert [c.name for c in inspect_files(broken, made[0]) if c.failed] == [name]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("deepspeed.json", b"{"),
        ("plan.yaml", b"a: ["),
        ("predicted.trace.json.gz", b"no gzip"),
        ("README.md", b"\xff"),
    ],
)
def test_a_broken_file_is_found(made: Made, name: str, content: bytes) -> None:
    broken = made[1] | {name: content}
    assert name in [c.name for c in inspect_files(broken, made[0]) if c.failed]


def test_another_plan_is_found(made: Made) -> None:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    other = make_plan_file(scenario, ParallelPlan(pp=2), "pp2")
    failed = [c for c in inspect_files(made[1], other) if c.failed]
    assert [(c.name, c.failed) for c in failed] == [("plan.yaml", "it loads to another plan")]


def test_the_zip_holds_the_files_and_never_changes(made: Made) -> None:
    content = zipped(made[1])
    assert content == zipped(dict(reversed(made[1].items())))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert {n: archive.read(n) for n in archive.namelist()} == made[1]
        assert archive.getinfo("torchrun.sh").external_attr >> 16 == 0o755
        assert archive.testzip() is None
