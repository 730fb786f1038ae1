"""Planning works where torch does not: every light module imports with torch blocked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import flopwright

ROOT = Path(flopwright.__file__).parent
HEAVY = ("torch", "deepspeed", "triton", "tokenizers", "safetensors", "transformers")
HEAVY_FILES = {"module.py", "reference.py", "op.py", "kernel.py"}
# Alembic runs it inside a migration, and it can be imported nowhere else.
NO_MODULES = {"store/migrations/env.py"}
# Needs the extra `fast`: asked for by name, never imported on the way.
FAST = "simulator/rollouts/compiled"
OPTIONAL = {"streamlit": "dashboards", "plotly": "figures", "matplotlib": "figures"}

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ImportError(name + ' is blocked here')
sys.meta_path.insert(0, Block())
"""


def light_modules() -> list[str]:
    names = []
    for path in sorted(p for p in ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        room = relative.parts[0]
        if room == "executor" and relative.parts[1:2] not in {("launch",), ("__init__.py",)}:
            continue
        if room == "dashboards" or path.name in HEAVY_FILES or relative.name == "__main__.py":
            continue
        if relative.as_posix() in NO_MODULES or relative.as_posix().startswith(FAST):
            continue
        if room in {"kernels", "models"} and path.name not in {"cost.py", "__init__.py"}:
            continue
        names.append(
            ".".join(("flopwright", *relative.with_suffix("").parts)).removesuffix(".__init__")
        )
    return names


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_every_light_module_imports_with_torch_and_plots_blocked() -> None:
    blocked = {*HEAVY, "matplotlib", "plotly", "streamlit", "scipy", "psycopg", "numba"}
    modules = light_modules()
    assert len(modules) > 50
    code = (
        BLOCK.format(blocked=blocked)
        + "import importlib\n"
        + "".join(f"importlib.import_module({m!r})\n" for m in modules)
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr[-2000:]


def test_plan_works_with_torch_blocked() -> None:
    code = BLOCK.format(blocked=set(HEAVY)) + (
        "from flopwright.cli import main\nmain(['plan', 'kimi_k2_mini_2cpu_fp32', '--json'])\n"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr[-2000:]
    assert '"step_time_s"' in result.stdout


def test_help_does_not_import_the_rooms() -> None:
    code = (
        "import sys\nfrom flopwright.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "rooms = ('torch', 'pandas', 'sqlalchemy', 'flopwright.planner', 'flopwright.simulator')\n"
        "bad = [m for m in rooms if m in sys.modules]\n"
        "assert not bad, bad\n"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr[-2000:]


def test_no_code_imports_a_room_by_its_folder_name() -> None:
    rooms = ("kernels", "models", "simulator", "planner", "executor", "dashboards", "scenarios")
    bad = []
    for path in [*ROOT.rglob("*.py"), *Path(ROOT.parent, "tests").rglob("*.py")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            words = line.split()
            if (
                words[:1] in (["import"], ["from"])
                and len(words) > 1
                and words[1].split(".")[0] in rooms
            ):
                bad.append(f"{path}:{number}: {line}")
    assert not bad, bad


def test_no_pickle_and_no_unsafe_yaml() -> None:
    words = (
        "import pickle",
        "from pickle",
        "torch.load(",
        "torch.save(",
        "yaml.load(",
        "yaml.unsafe_load",
        "allow_pickle=True",
    )
    bad = [
        f"{path}: {word}"
        for path in ROOT.rglob("*.py")
        for word in words
        if word in path.read_text()
    ]
    assert not bad, bad
