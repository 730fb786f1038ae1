"""What can be checked of an exported file without its target: that it is what it claims to be.

The targets' own parsers check the same files in the project's tests (docs/exports.md); here
every file is read back as its reader would begin to: JSON, YAML and gzip parse, the plan
loads to the plan that was exported, and the manifest's checksums are those of the files.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tomllib
import zipfile
from collections.abc import Mapping

import yaml

from flopwright.plan.file import PlanFile
from flopwright.planner.export.bundle import EXECUTABLE
from flopwright.spec.base import Spec
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import parse_yaml


class FileCheck(Spec):
    """One file of a bundle: `passed` in words, `failed` what went wrong ("" where nothing)."""

    name: str
    size_bytes: int
    passed: tuple[str, ...] = ()
    failed: str = ""


def inspect_files(files: Mapping[str, bytes], plan: PlanFile) -> tuple[FileCheck, ...]:
    """Returns one check a file, in the order of their names.

    Args:
        plan: what was exported; plan.yaml must load to it.
    """
    sums = _checksums(files)
    return tuple(_checked(name, files[name], plan, sums) for name in sorted(files))


def _checksums(files: Mapping[str, bytes]) -> dict[str, str]:
    try:
        return dict(json.loads(files["manifest.json"])["sha256"])
    except (KeyError, ValueError, TypeError):
        return {}


def _checked(name: str, content: bytes, plan: PlanFile, sums: Mapping[str, str]) -> FileCheck:
    try:
        passed = list(_reads(name, content, plan))
    except Exception as error:  # whatever a parser raises is the finding
        return FileCheck(name=name, size_bytes=len(content), failed=f"{error}")
    if name in sums:
        if sums[name] != hashlib.sha256(content).hexdigest():
            failed = "its checksum is not the manifest's"
            return FileCheck(name=name, size_bytes=len(content), failed=failed)
        passed.append("checksum in the manifest")
    return FileCheck(name=name, size_bytes=len(content), passed=tuple(passed))


def _reads(name: str, content: bytes, plan: PlanFile) -> list[str]:
    """Returns what the file was found to be; raises what its parser raises."""
    if name.endswith(".json.gz"):
        events = json.loads(gzip.decompress(content))["traceEvents"]
        return [f"a trace of {len(events):,} events"]
    text = content.decode("utf-8")
    if name.endswith(".json"):
        json.loads(text)
        return ["JSON"]
    if name.endswith(".toml"):
        tomllib.loads(text)
        return ["TOML"]
    if name == "plan.yaml" or name.startswith("fallback-"):
        loaded = validate(PlanFile, parse_yaml(text, name))
        if name == "plan.yaml" and loaded.parallel != plan.parallel:
            raise ValueError("it loads to another plan")
        return ["loads as a plan, hashes match"]
    if name.endswith((".yaml", ".yml")):
        documents = list(yaml.safe_load_all(text))
        return [f"YAML, {len(documents)} document{'s' if len(documents) > 1 else ''}"]
    if name.endswith(".sh"):
        if not text.startswith("#!") and name in EXECUTABLE:
            raise ValueError("no interpreter line")
        return ["shell script"]
    return ["text"]


def zipped(files: Mapping[str, bytes]) -> bytes:
    """Returns the files as one zip, scripts executable; the same files give the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (0o755 if name in EXECUTABLE else 0o644) << 16
            archive.writestr(info, files[name])
    return buffer.getvalue()
