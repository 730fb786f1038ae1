"""`flopwright doctor`: what is installed here and which verbs work."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from typing import Annotated, Any, Final

import typer

import flopwright

# verb -> the packages it needs beyond the base install, and the extra that brings them
NEEDS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "plan": ((), ""),
    "explain": ((), ""),
    "recommend": ((), ""),
    "support": ((), ""),
    "sweep": (("pyarrow",), "sweep"),
    "simulate": ((), ""),
    "accuracy": ((), ""),
    "regret": ((), ""),
    "import": ((), ""),
    "import-model": ((), ""),
    "import-log": ((), ""),
    "store": ((), ""),
    "export": ((), ""),
    "rollouts": ((), ""),
    "calibrate": ((), ""),
    "compare": ((), ""),
    "schema": ((), ""),
    "probe": (("torch",), "train"),
    "run": (("torch", "deepspeed", "tokenizers", "safetensors"), "train"),
    "tournament": (("torch", "deepspeed", "tokenizers", "safetensors"), "train"),
    "generate": (("torch", "tokenizers", "safetensors"), "train"),
    "convert": (("torch",), "train"),
    "demo": (("torch", "deepspeed", "tokenizers", "safetensors", "matplotlib", "plotly"), "all"),
    "dashboard": (("streamlit", "plotly"), "dashboard"),
}
_PACKAGES: Final = (
    "numpy", "pandas", "pydantic", "simpy", "sqlalchemy", "matplotlib", "plotly", "streamlit",
    "torch", "triton", "deepspeed", "tokenizers", "safetensors", "psycopg",
)  # fmt: skip


def version_data() -> dict[str, Any]:
    """Returns version, Python and the calibrations that ship, as plain data."""
    from flopwright.simulator.calibration.files import shipped_calibration_ids

    return {
        "flopwright": flopwright.__version__,
        "python": platform.python_version(),
        "calibrations": list(shipped_calibration_ids()),
    }


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def doctor_data() -> dict[str, Any]:
    """Returns what is installed, and for each verb what it lacks here."""
    packages = {name: _installed(name) for name in _PACKAGES}
    verbs = {
        verb: {
            "works": all(importlib.util.find_spec(p) is not None for p in needs),
            "missing": [p for p in needs if importlib.util.find_spec(p) is None],
            "extra": extra,
        }
        for verb, (needs, extra) in NEEDS.items()
    }
    machine = {
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
    }
    return {"machine": machine, "packages": packages, "verbs": verbs}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is installed and which verbs work here.

    Example: flopwright doctor
    """
    data = doctor_data()
    if as_json:
        typer.echo(json.dumps(data))
        return
    typer.echo("  ".join(f"{k}: {v}" for k, v in data["machine"].items()))
    for name, version in data["packages"].items():
        typer.echo(f"  {name:<12} {version or '-'}")
    for verb, state in data["verbs"].items():
        fix = (
            ""
            if state["works"]
            else f"needs {', '.join(state['missing'])}: pip install 'flopwright[{state['extra']}]'"
        )
        typer.echo(f"  {verb:<10} {'works' if state['works'] else fix}")
