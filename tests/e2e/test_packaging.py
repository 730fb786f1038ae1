"""What a user installs: a light base, and a wheel and an sdist that work from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flopwright

REPOSITORY = Path(flopwright.__file__).resolve().parent.parent
BASE_LIMIT_BYTES = 250_000_000
pytestmark = [pytest.mark.slow, pytest.mark.network]


def run(*command: str | Path, cwd: Path, timeout: int = 600) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    result = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, f"{command}:\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
    return result.stdout


def uv() -> Path:
    path = Path(sys.executable).with_name("uv")
    if not path.exists():
        pytest.skip("needs uv in the environment: make install puts it there")
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the wheel and the sdist, built from a clean clone of the committed tree."""
    folder = tmp_path_factory.mktemp("build")
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout: a clean clone cannot be made")
    run("git", "clone", "-q", "--no-hardlinks", REPOSITORY, folder / "clone", cwd=folder)
    run(
        sys.executable,
        "-m",
        "build",
        "--installer",
        "uv",
        "--outdir",
        folder / "dist",
        folder / "clone",
        cwd=folder,
    )
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_installs_in_a_fresh_environment_and_plans_from_any_folder(
    kind: str, built: dict[str, Path], tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    run(
        uv(),
        "pip",
        "install",
        "-q",
        "--python",
        venv / "bin" / "python",
        built[kind],
        cwd=tmp_path,
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    out = run(
        venv / "bin" / "flopwright", "plan", "kimi_k2_mini_2cpu_fp32", "--json", cwd=elsewhere
    )
    assert '"step_time_s"' in out
    run(
        venv / "bin" / "python",
        "-c",
        "import importlib.util as u; assert u.find_spec('torch') is None",
        cwd=elsewhere,
    )
    shutil.rmtree(venv)


def test_the_base_install_is_light(built: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "site"
    run(
        uv(),
        "pip",
        "install",
        "-q",
        "--python",
        sys.executable,
        "--target",
        target,
        built["wheel"],
        cwd=tmp_path,
    )
    size_bytes = sum(
        p.stat().st_size for p in target.rglob("*") if p.is_file() and not p.is_symlink()
    )
    assert size_bytes < BASE_LIMIT_BYTES, f"{size_bytes / 1e6:.0f} MB"
