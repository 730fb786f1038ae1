"""Loading scenarios, clusters, models and plans: names become catalog files, files become records.

A scenario may give its model and cluster in place, as a path relative to its own file, or
by a catalog name; a cluster may name its GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

import flopwright
from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.plan.file import SCHEMA_VERSION, PlanFile, PredictedStep
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.base import Spec
from flopwright.spec.cluster import ClusterSpec, GpuSpec
from flopwright.spec.model import ModelSpec
from flopwright.spec.scenario import Scenario
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import Document, KeyPath, parse_yaml, read_yaml

S = TypeVar("S", bound=Spec)

_ROOT: Final = Path(flopwright.__file__).parent
MODEL_CATALOG: Final = _ROOT / "models" / "catalog"
GPU_CATALOG: Final = _ROOT / "simulator" / "hardware" / "catalog"
CLUSTER_CATALOG: Final = _ROOT / "scenarios" / "clusters"
SCENARIO_CATALOG: Final = _ROOT / "scenarios"


def catalog_names(folder: Path) -> list[str]:
    """Returns the names a catalog folder knows, sorted."""
    return sorted(p.stem for p in folder.glob("*.yaml"))


def _reference(document: Document, key: KeyPath, name: str, catalog: Path, what: str) -> Document:
    """Returns the document a name or path refers to."""
    if name.endswith((".yaml", ".yml")):
        return read_yaml(Path(document.file).parent / name)
    path = catalog / f"{name}.yaml"
    if not path.is_file():
        raise InputError(
            Violation(
                file=document.file,
                line=document.line_of(key),
                field=".".join(map(str, key)),
                value=repr(name),
                rule=f"no such {what} in the catalog",
                nearest_fix=did_you_mean(name, catalog_names(catalog)),
            )
        )
    return read_yaml(path)


def _inline(document: Document, key: KeyPath, catalog: Path, what: str) -> Any:
    """Replaces a reference at `key` of the document's data by the referred data, in place."""
    parent: Any = document.data
    for part in key[:-1]:
        parent = parent.get(part) if isinstance(parent, dict) else None
    if not isinstance(parent, dict) or not isinstance(parent.get(key[-1]), str):
        return
    found = _reference(document, key, parent[key[-1]], catalog, what)
    if what == "cluster":
        _inline(found, ("node", "gpu"), GPU_CATALOG, "GPU")
    # A mistake inside the referred file is reported with that file and line.
    records: dict[str, type[Spec]] = {"model": ModelSpec, "cluster": ClusterSpec, "GPU": GpuSpec}
    validate(records[what], found)
    parent[key[-1]] = found.data


def load_model(name_or_path: str | Path) -> ModelSpec:
    """Returns a model from a file or the catalog."""
    return validate(ModelSpec, _open(name_or_path, MODEL_CATALOG, "model"))


def load_cluster(name_or_path: str | Path) -> ClusterSpec:
    """Returns a cluster from a file or the catalog."""
    document = _open(name_or_path, CLUSTER_CATALOG, "cluster")
    _inline(document, ("node", "gpu"), GPU_CATALOG, "GPU")
    return validate(ClusterSpec, document)


def load_gpu(name_or_path: str | Path) -> GpuSpec:
    """Returns a GPU from a file or the catalog."""
    return validate(GpuSpec, _open(name_or_path, GPU_CATALOG, "GPU"))


def load_scenario(name_or_path: str | Path) -> Scenario:
    """Returns a scenario from a file or from those that ship with the tool.

    Raises:
        InputError: every violation of the file, or of the file it refers to.
    """
    return scenario_from(_open(name_or_path, SCENARIO_CATALOG, "scenario"))


def scenario_from_text(text: str, file: str = "scenario.yaml") -> Scenario:
    """Returns a scenario from YAML text that may only refer to the catalogs, never to files."""
    document = parse_yaml(text, file)
    for key in ("model", "cluster"):
        value = document.data.get(key) if isinstance(document.data, dict) else None
        if isinstance(value, str) and value.endswith((".yaml", ".yml")):
            raise InputError(
                Violation(
                    file=file,
                    line=document.line_of((key,)),
                    field=key,
                    value=repr(value),
                    rule="an uploaded scenario cannot refer to files",
                    nearest_fix="give it in place or by catalog name",
                )
            )
    return scenario_from(document)


def scenario_from(document: Document) -> Scenario:
    """Returns the document as a Scenario, its references resolved."""
    if isinstance(document.data, dict):
        _inline(document, ("model",), MODEL_CATALOG, "model")
        _inline(document, ("cluster",), CLUSTER_CATALOG, "cluster")
        _inline(document, ("cluster", "node", "gpu"), GPU_CATALOG, "GPU")
    return validate(Scenario, document)


def _open(name_or_path: str | Path, catalog: Path, what: str) -> Document:
    text = str(name_or_path)
    path = Path(text)
    if path.suffix in {".yaml", ".yml"}:
        return read_yaml(path)
    shipped = catalog / f"{text}.yaml"
    if shipped.is_file() and path.name == text:
        return read_yaml(shipped)
    raise InputError(
        Violation(
            value=repr(text),
            rule=f"neither a .yaml file nor a {what} of the catalog",
            nearest_fix=did_you_mean(text, catalog_names(catalog)),
        )
    )


def load_plan(path: str | Path) -> PlanFile:
    """Returns a plan file, its hashes checked against its contents.

    Raises:
        InputError: unreadable or invalid file, a newer schema, or hashes that do not match
            (the file was edited by hand without `flopwright plan`).
    """
    document = read_yaml(Path(path))
    if isinstance(document.data, dict):
        version = document.data.get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise InputError(
                Violation(
                    file=str(path),
                    line=document.line_of(("schema_version",)),
                    field="schema_version",
                    value=str(version),
                    rule="written by a newer flopwright",
                    limit=str(SCHEMA_VERSION),
                    nearest_fix="upgrade flopwright",
                )
            )
    plan = validate(PlanFile, document)
    checks = (
        ("model_hash", plan.model_hash, plan.scenario.model.content_hash()),
        ("scenario_hash", plan.scenario_hash, plan.scenario.content_hash()),
        ("parallel_hash", plan.parallel_hash, plan.parallel.content_hash()),
    )
    wrong = [
        Violation(
            file=str(path),
            line=document.line_of((field,)),
            field=field,
            value=found,
            rule="does not match the contents of the file",
            nearest_fix=f"the contents hash to {actual}; make the plan again",
        )
        for field, found, actual in checks
        if found != actual
    ]
    if wrong:
        raise InputError(wrong)
    return plan


def dump_yaml(record: Spec, header: str = "") -> str:
    """Returns a record as YAML text that loads back to an equal record."""
    body = yaml.safe_dump(record.to_data(), sort_keys=False, allow_unicode=True, width=100)
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    return comment + body


def make_plan_file(
    scenario: Scenario, parallel: ParallelPlan, name: str, predicted: PredictedStep | None = None
) -> PlanFile:
    """Returns a plan file with its hashes filled in."""
    return PlanFile(
        tool_version=flopwright.__version__,
        name=name,
        model_hash=scenario.model.content_hash(),
        scenario_hash=scenario.content_hash(),
        parallel_hash=parallel.content_hash(),
        scenario=scenario,
        parallel=parallel,
        predicted=predicted,
    )
