"""Shared fixtures: services that a test may need, and the list of what was skipped."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Ranks of a test compute with one thread each; see docs/accuracy.md on timing.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

NO_MEASURED_DATA = "the measured data are not here; FLOPWRIGHT_MEASURED_DATA names their folder"

# Files that take minutes, the longest first: one that is begun last goes on alone.
LONGEST = (
    "test_same_numbers.py",
    "test_resume.py",
    "test_dry_acceptance.py",
    "test_in_the_interpreter.py",
    "test_dashboard_browser.py",
    "test_data_parallel_ranks.py",
    "test_ahead_of_time.py",
    "test_slurm.py",
    "test_worker_started_by_hand.py",
    "test_dry_step.py",
    "test_dashboard_pages.py",
    "test_three_plans.py",
    "test_phase_schedule.py",
    "test_tournament.py",
    "test_calibration_loop.py",
)

_skips: list[str] = []


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps every test out of the user's own store, caches and terminal width."""
    monkeypatch.delenv("FLOPWRIGHT_STORE", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)  # parallel test workers set it to 80
    if "FLOPWRIGHT_HOME" not in os.environ:
        monkeypatch.setenv("FLOPWRIGHT_HOME", str(tmp_path_factory.getbasetemp() / "home"))


@pytest.fixture
def need_service() -> Callable[[str, bool, str], None]:
    """Returns a function that skips, by name and with the way to get it, or fails in CI."""

    def need(name: str, available: bool, how: str) -> None:
        if available:
            return
        message = f"needs {name}: {how}"
        if os.environ.get("FLOPWRIGHT_REQUIRE_SERVICES") == "1":
            pytest.fail(message)
        pytest.skip(message)

    return need


@pytest.fixture
def postgres_url(need_service: Callable[[str, bool, str], None]) -> str:
    """Returns the URL of a PostgreSQL database that tests may write to."""
    url = os.environ.get("FLOPWRIGHT_TEST_POSTGRES_URL", "")
    how = "apt-get install postgresql, then set FLOPWRIGHT_TEST_POSTGRES_URL (see .ci/services.sh)"
    need_service("PostgreSQL", bool(url), how)
    return url


@pytest.fixture(scope="session")
def measured_data() -> Path:
    """Returns the folder of measured public data (training_runs.csv and its neighbours).

    It is not part of the repository: FLOPWRIGHT_MEASURED_DATA names it, or it lies beside
    the checkout as `shared`.
    """
    beside = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("FLOPWRIGHT_MEASURED_DATA", beside))
    if not (folder / "validation" / "training_runs.csv").is_file():
        pytest.skip(NO_MEASURED_DATA)
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first; `make test` hands files out in this order."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collects skips, so that CI can hold them against a committed list."""
    if report.skipped and not hasattr(report, "wasxfail"):
        if NO_MEASURED_DATA in str(report.longrepr) and not _must_have_data():
            return
        _skips.append(report.nodeid)


def _must_have_data() -> bool:
    """Returns whether the folder of measured data was named, and so must be there."""
    return bool(os.environ.get("FLOPWRIGHT_MEASURED_DATA"))


def pytest_sessionfinish() -> None:
    """Writes the skipped tests to the file named in FLOPWRIGHT_SKIPS_FILE."""
    target = os.environ.get("FLOPWRIGHT_SKIPS_FILE")
    if target and not os.environ.get("PYTEST_XDIST_WORKER"):
        Path(target).write_text("".join(f"{name}\n" for name in sorted(set(_skips))))
